#include "data/mapped_bytes.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/mman.h>
#include <sys/stat.h>

#include <cerrno>
#include <cstring>

#include "core/files/fd.h"
#include "lockstep/core/error.h"

namespace lockstep::data {

MappedBytes::MappedBytes(const std::filesystem::path& file, std::string_view address) {
  const auto fail = [&](std::string_view what) {
    throw DataError(fmt::format("{} {}: {}", address, file.string(), what));
  };
  // Without O_NONBLOCK a named pipe would wait for its writer.
  const Fd descriptor(open(file.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK));
  if (descriptor.get() < 0) fail(fmt::format("cannot be opened: {}", std::strerror(errno)));
  struct stat status {};
  if (fstat(descriptor.get(), &status) != 0) {
    fail(fmt::format("cannot be read: {}", std::strerror(errno)));
  }
  if (S_ISDIR(status.st_mode)) fail("is a folder, not a file");
  if (!S_ISREG(status.st_mode)) {
    fail("is a pipe or a device: rows are read from a regular file; copy it into one");
  }
  if (status.st_size == 0) fail("is empty");
  const auto size = static_cast<size_t>(status.st_size);
  void* memory = mmap(nullptr, size, PROT_READ, MAP_PRIVATE, descriptor.get(), 0);
  if (memory == MAP_FAILED) fail(fmt::format("cannot be mapped: {}", std::strerror(errno)));
  bytes_ = {static_cast<const char*>(memory), size};
}

MappedBytes::~MappedBytes() { munmap(const_cast<char*>(bytes_.data()), bytes_.size()); }

}  // namespace lockstep::data
