// Any bytes as an accelerate configuration: settings or a ConfigError, nothing else.

#include "launch/options/accelerate.h"
#include "lockstep/core/error.h"

extern "C" int LLVMFuzzerTestOneInput(const unsigned char* data, size_t size) {
  try {
    const auto settings = lockstep::launch::parse_accelerate(
        {reinterpret_cast<const char*>(data), size}, "fuzz.yaml");
    settings.flags();
    settings.environment();
  } catch (const lockstep::ConfigError&) {
  }
  return 0;
}
