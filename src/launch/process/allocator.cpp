#include "launch/process/allocator.h"

#include <dlfcn.h>
#include <elf.h>
#include <fmt/format.h>
#include <fmt/ranges.h>
#include <link.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <fstream>
#include <optional>

#include "launch/job/run.h"
#include "lockstep/core/environment.h"
#include "lockstep/core/error.h"

namespace lockstep::launch {
namespace {

namespace fs = std::filesystem;

struct Allocator {
  std::string_view name, package;
  std::array<const char*, 2> libraries;  // the first that is there
};

constexpr std::array<Allocator, 2> kKnown = {{
    {"tcmalloc", "libtcmalloc-minimal4", {"libtcmalloc_minimal.so.4", "libtcmalloc.so.4"}},
    {"jemalloc", "libjemalloc2", {"libjemalloc.so.2", "libjemalloc.so.1"}},
}};

// LD_LIBRARY_PATH's, the system's own, and those that the linker only has in its cache.
std::vector<fs::path> library_folders() {
  std::vector<fs::path> folders;
  void* self = dlopen(nullptr, RTLD_NOW);
  Dl_serinfo size{};
  if (dlinfo(self, RTLD_DI_SERINFOSIZE, &size) == 0) {
    std::vector<std::max_align_t> memory(size.dls_size / sizeof(std::max_align_t) + 1);
    auto* found = reinterpret_cast<Dl_serinfo*>(memory.data());
    found->dls_size = size.dls_size;
    found->dls_cnt = size.dls_cnt;
    if (dlinfo(self, RTLD_DI_SERINFO, found) == 0) {
      for (unsigned i = 0; i < found->dls_cnt; ++i)
        folders.emplace_back(found->dls_serpath[i].dls_name);
    }
  }
  dlclose(self);
  folders.emplace_back("/usr/local/lib");
  if (const auto conda = env_text("CONDA_PREFIX")) folders.push_back(fs::path(*conda) / "lib");
  return folders;
}

bool is_file(const fs::path& path) {
  std::error_code error;
  return fs::is_regular_file(path, error);
}

std::optional<ElfW(Ehdr)> elf_header(const fs::path& path) {
  ElfW(Ehdr) header{};
  std::ifstream file(path, std::ios::binary);
  file.read(reinterpret_cast<char*>(&header), sizeof(header));
  if (!file || std::memcmp(header.e_ident, ELFMAG, SELFMAG) != 0) return std::nullopt;
  return header;
}

// Whether it is one for this kind of machine. Programs that may be loaded at any address are of the
// same type, and are not told apart.
bool is_shared_library(const fs::path& path) {
  const auto own = elf_header("/proc/self/exe"), header = elf_header(path);
  return header && header->e_type == ET_DYN &&
         (!own || (header->e_machine == own->e_machine &&
                   header->e_ident[EI_CLASS] == own->e_ident[EI_CLASS]));
}

[[noreturn]] void refuse(std::string_view name, std::string_view reason) {
  throw ConfigError(fmt::format("[run] --memory-allocator {}: {}", name, reason));
}

// The dynamic linker says nothing of a library in LD_PRELOAD that it cannot split off or load.
std::string splittable(std::string_view name, const std::string& path) {
  if (path.find_first_of(" :") == path.npos) return path;
  refuse(name, fmt::format("LD_PRELOAD can name no path with a space or a colon ({}): give a "
                           "symbolic link without them",
                           path));
}

}  // namespace

std::string find_allocator(std::string_view name, const std::vector<fs::path>& folders) {
  if (name.find('/') != name.npos) {
    if (!is_file(name)) refuse(name, "there is no such file");
    if (!is_shared_library(name)) {
      refuse(name,
             "it is no shared library of this kind of machine: give the allocator's .so file");
    }
    return splittable(name, fs::absolute(name));
  }
  const auto known = std::ranges::find(kKnown, name, &Allocator::name);
  if (known == kKnown.end()) {
    throw ConfigError(
        fmt::format("[run] --memory-allocator {} is none of system, tcmalloc, jemalloc and the "
                    "path of a library",
                    name));
  }
  for (const char* library : known->libraries) {
    for (const auto& folder : folders) {
      if (is_file(folder / library)) return splittable(name, folder / library);
    }
  }
  std::vector<std::string> looked;
  for (const auto& folder : folders) looked.push_back(folder);
  throw ConfigError(fmt::format(
      "[run] --memory-allocator {}: no {} in {}: install it (Debian: {}), or give the library's "
      "path",
      name, fmt::join(known->libraries, " or "), fmt::join(looked, ", "), known->package));
}

std::string find_allocator(std::string_view name) {
  return find_allocator(name, library_folders());
}

}  // namespace lockstep::launch
