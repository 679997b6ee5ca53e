// Any bytes as a configuration: what is read can be shown and read again, what is not has a line.
// Behind a NUL byte come overrides.
#include <cstdlib>
#include <string>
#include <vector>

#include "lockstep/core/error.h"
#include "lockstep/train/config.h"

namespace {

using lockstep::ConfigError;

// Each error of the list begins with a place.
void expect_places(const std::string& message) {
  const auto expect_place = [](const std::string& line) {
    if (line.find("fuzz.yaml:") == line.npos && line.find("--set ") == line.npos) std::abort();
  };
  if (message.find('\n') == message.npos) return expect_place(message);
  for (size_t at = message.find("\n  "); at != message.npos; at = message.find("\n  ", at + 1)) {
    expect_place(message.substr(at, message.find("\n  ", at + 1) - at));
  }
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const unsigned char* data, size_t size) {
  std::string text(reinterpret_cast<const char*>(data), size);
  std::vector<std::string> overrides;
  for (size_t end = text.rfind('\0'); end != text.npos && overrides.size() < 8;
       end = text.rfind('\0')) {
    overrides.push_back(text.substr(end + 1));
    text.resize(end);
  }
  try {
    const auto config = lockstep::train::parse_config(text, "fuzz.yaml", overrides);
    const std::string shown = lockstep::train::show_config(config);
    try {
      const auto again = lockstep::train::parse_config(shown, "shown.yaml");
      lockstep::train::check_config(again);
      for (const auto& [path, origin] : config.origins) {
        // parallel.fsdp is shown with its strategy only.
        if (!again.origins.contains(path)) std::abort();
      }
    } catch (const ConfigError&) {
      std::abort();
    }
  } catch (const ConfigError& error) {
    expect_places(error.what());
  }
  return 0;
}
