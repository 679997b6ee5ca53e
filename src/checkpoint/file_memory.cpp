#include "checkpoint/file_memory.h"

#include <ATen/ATen.h>
#include <fcntl.h>
#include <fmt/format.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cerrno>
#include <memory>
#include <system_error>

#include "lockstep/core/error.h"

namespace lockstep::checkpoint {
namespace {

constexpr int64_t kPageBytes = 4096;

struct FileMemory {
  std::string folder;
  void* data;
  size_t bytes;
};

void unmap_file(void* context) {
  const std::unique_ptr<FileMemory> memory(static_cast<FileMemory*>(context));
  ::munmap(memory->data, memory->bytes);
}

std::string no_file(const std::string& folder, int64_t bytes, int error) {
  return fmt::format(
      "offload_folder '{}': no file of {} bytes for shards, gradients or optimizer state ({}): "
      "name a folder on a disk with room for them",
      folder, bytes, std::generic_category().message(error));
}

// Closed, and errno, where there is no room.
Fd new_unnamed_file(const std::string& folder, int64_t bytes) {
  std::string path = folder + "/lockstep-XXXXXX";
  Fd file(::mkostemp(path.data(), O_CLOEXEC));
  if (!file) return file;
  ::unlink(path.c_str());
  int error = 0;
  do {
    error = ::posix_fallocate(file.get(), 0, bytes);
  } while (error == EINTR);
  if (error == 0) return file;
  file.reset();
  errno = error;
  return file;
}

}  // namespace

at::Tensor file_zeros(const std::string& folder, int64_t count, const at::TensorOptions& options) {
  const int64_t bytes = count * static_cast<int64_t>(options.dtype().itemsize());
  if (bytes < kPageBytes) return at::zeros({count}, options);
  const Fd file = new_unnamed_file(folder, bytes);
  void* data = MAP_FAILED;
  if (file) {
    data = ::mmap(nullptr, static_cast<size_t>(bytes), PROT_READ | PROT_WRITE, MAP_SHARED,
                  file.get(), 0);
  }
  if (data == MAP_FAILED) throw ConfigError("[fsdp] " + no_file(folder, bytes, errno));
  auto memory = std::make_unique<FileMemory>(FileMemory{folder, data, static_cast<size_t>(bytes)});
  return at::for_blob(data, {count})
      .context(memory.release(), &unmap_file)
      .options(options)
      .make_tensor();
}

at::Tensor zeros_beside(const at::Tensor& tensor) {
  if (!tensor.has_storage() || tensor.storage().data_ptr().get_deleter() != &unmap_file) {
    return at::zeros_like(tensor);
  }
  const void* memory = tensor.storage().data_ptr().get_context();
  return file_zeros(static_cast<const FileMemory*>(memory)->folder, tensor.numel(),
                    tensor.options().requires_grad(false))
      .view(tensor.sizes());
}

std::string missing_room(const std::string& folder, int64_t bytes, Fd& held) {
  if (bytes == 0) return {};
  held = new_unnamed_file(folder, bytes);
  return held ? "" : no_file(folder, bytes, errno);
}

}  // namespace lockstep::checkpoint
