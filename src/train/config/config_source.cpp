#include "lockstep/train/config_source.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cerrno>
#include <charconv>
#include <cstdlib>
#include <cstring>
#include <optional>
#include <string_view>

#include "core/files/read_file.h"
#include "lockstep/core/environment.h"
#include "lockstep/core/error.h"

namespace lockstep::train {
namespace {

// Texts one after another, each after its length: "3:abc".
std::string framed(const ConfigSource& source) {
  std::string all;
  const auto add = [&all](const std::string& text) {
    all += fmt::format("{}:{}", text.size(), text);
  };
  add(source.name);
  add(source.text);
  for (const auto& flag : source.flags) {
    add(flag.key);
    add(flag.value);
    add(flag.origin);
  }
  return all;
}

std::optional<ConfigSource> unframed(std::string_view all) {
  std::vector<std::string> texts;
  while (!all.empty()) {
    size_t size = 0;
    const auto [end, error] = std::from_chars(all.data(), all.data() + all.size(), size);
    const size_t begin = static_cast<size_t>(end - all.data()) + 1;
    if (error != std::errc() || begin > all.size() || size > all.size() - begin) return {};
    texts.emplace_back(all.substr(begin, size));
    all.remove_prefix(begin + size);
  }
  if (texts.size() < 2 || texts.size() % 3 != 2) return {};
  ConfigSource source{.name = texts[0], .text = texts[1]};
  for (size_t i = 2; i < texts.size(); i += 3) {
    source.flags.push_back({.key = texts[i], .value = texts[i + 1], .origin = texts[i + 2]});
  }
  return source;
}

}  // namespace

ConfigSource read_source(const std::string& path) {
  if (const auto kept = env_text("LOCKSTEP_CONFIG")) {
    unsetenv(kSourceVariable);
    const std::string about = fmt::format("[config] {}, as its launcher has read it", path);
    const auto source = unframed(read_file(*kept, about, "has the launcher ended?"));
    if (!source) throw ConfigError(fmt::format("{}: {} is damaged", about, *kept));
    if (source->name == path) return *source;
  }
  const bool is_missing = access(path.c_str(), F_OK) != 0;
  return {
      .name = path,
      .text = read_file(path, "[config] " + path,
                        is_missing ? "`lockstep config init FILE` writes one to start from" : "")};
}

std::string keep_source(const ConfigSource& source) {
  const std::string all = framed(source);
  // Without MFD_CLOEXEC: a process that becomes a rank keeps it.
  const int file = memfd_create("lockstep-config", MFD_ALLOW_SEALING);
  const auto refuse = [&] {
    throw Error(
        fmt::format("[config] {}: no memory to keep it in: {}", source.name, std::strerror(errno)));
  };
  if (file < 0) refuse();
  for (size_t done = 0; done < all.size();) {
    const ssize_t count = write(file, all.data() + done, all.size() - done);
    if (count < 0 && errno != EINTR) refuse();
    if (count > 0) done += static_cast<size_t>(count);
  }
  fcntl(file, F_ADD_SEALS, F_SEAL_WRITE | F_SEAL_GROW | F_SEAL_SHRINK | F_SEAL_SEAL);
  return fmt::format("/proc/{}/fd/{}", getpid(), file);
}

}  // namespace lockstep::train
