#include "lockstep/checkpoint/file_system.h"

#include <dirent.h>
#include <fcntl.h>
#include <fmt/format.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <csignal>
#include <cstdio>
#include <cstring>

#include "core/process/standard_streams.h"
#include "lockstep/checkpoint/error.h"

namespace lockstep::checkpoint {
namespace {

// While it lives, a write of this thread beyond RLIMIT_FSIZE is an error (EFBIG), and no signal
// that ends the process without a word.
class WithoutSizeSignal {
 public:
  WithoutSizeSignal() {
    sigemptyset(&signal_);
    sigaddset(&signal_, SIGXFSZ);
    sigset_t pending;
    sigpending(&pending);
    was_pending_ = sigismember(&pending, SIGXFSZ) == 1;
    pthread_sigmask(SIG_BLOCK, &signal_, &before_);
  }
  ~WithoutSizeSignal() {
    const int error = errno;
    const timespec at_once{};
    if (error == EFBIG && !was_pending_) sigtimedwait(&signal_, nullptr, &at_once);
    pthread_sigmask(SIG_SETMASK, &before_, nullptr);
    errno = error;
  }
  WithoutSizeSignal(const WithoutSizeSignal&) = delete;
  WithoutSizeSignal& operator=(const WithoutSizeSignal&) = delete;

 private:
  sigset_t signal_, before_;
  bool was_pending_ = false;
};

}  // namespace

int FileSystem::open(const std::string& path, int flags) {
  open_standard_streams();
  return ::open(path.c_str(), flags | O_CLOEXEC, 0666);
}
ssize_t FileSystem::write(int fd, const char* bytes, size_t count) {
  const WithoutSizeSignal guard;
  return ::write(fd, bytes, count);
}
int FileSystem::fsync(int fd) { return ::fsync(fd); }
int FileSystem::close(int fd) { return ::close(fd); }
int FileSystem::rename(const std::string& from, const std::string& to) {
  return ::rename(from.c_str(), to.c_str());
}
int FileSystem::unlink(const std::string& path) { return ::unlink(path.c_str()); }
int FileSystem::make_directory(const std::string& path) { return ::mkdir(path.c_str(), 0777); }
int FileSystem::remove_directory(const std::string& path) { return ::rmdir(path.c_str()); }
void* FileSystem::map(int fd, size_t bytes) {
  return ::mmap(nullptr, bytes, PROT_READ, MAP_SHARED, fd, 0);
}
int FileSystem::unmap(void* address, size_t bytes) { return ::munmap(address, bytes); }
void FileSystem::begin_writing(int fd, int64_t offset, int64_t bytes) {
  ::sync_file_range(fd, offset, bytes, SYNC_FILE_RANGE_WRITE);
}
int FileSystem::lock(int fd) { return ::flock(fd, LOCK_EX | LOCK_NB); }
int64_t FileSystem::size(int fd) {
  struct stat status {};
  if (::fstat(fd, &status) != 0) return -1;
  if (!S_ISREG(status.st_mode)) {
    errno = S_ISDIR(status.st_mode) ? EISDIR : EINVAL;
    return -1;
  }
  return status.st_size;
}
std::optional<std::vector<std::string>> FileSystem::list(const std::string& path) {
  DIR* folder = ::opendir(path.c_str());
  if (folder == nullptr) return std::nullopt;
  std::vector<std::string> names;
  errno = 0;
  while (const dirent* entry = ::readdir(folder)) {
    const std::string_view name = entry->d_name;
    if (name != "." && name != "..") names.emplace_back(name);
    errno = 0;
  }
  const int error = errno;
  ::closedir(folder);
  errno = error;
  if (error != 0) return std::nullopt;
  std::sort(names.begin(), names.end());
  return names;
}

FileSystem& system_files() {
  static FileSystem files;
  return files;
}

void throw_system_error(const std::string& path, std::string_view what) {
  throw CheckpointError(fmt::format("[checkpoint] {}: {}: {}", path, what, std::strerror(errno)));
}

OutputFile::OutputFile(FileSystem& files, std::string path)
    : files_(files),
      path_(std::move(path)),
      fd_(files.open(path_, O_WRONLY | O_CREAT | O_TRUNC | O_NOFOLLOW)) {
  if (fd_ < 0) throw_system_error(path_, "cannot be made");
}

OutputFile::~OutputFile() {
  if (fd_ >= 0) files_.close(fd_);
}

void OutputFile::write(std::string_view bytes) {
  while (!bytes.empty()) {
    const ssize_t count = files_.write(fd_, bytes.data(), bytes.size());
    if (count < 0 && errno == EINTR) continue;
    if (count == 0) errno = ENOSPC;
    if (count <= 0) throw_system_error(path_, "cannot be written");
    bytes.remove_prefix(count);
    written_ += count;
  }
  constexpr int64_t kEnough = 8 << 20;
  if (written_ - begun_ < kEnough) return;
  files_.begin_writing(fd_, begun_, written_ - begun_);
  begun_ = written_;
}

void OutputFile::finish() {
  if (files_.fsync(fd_) != 0) throw_system_error(path_, "cannot be brought to the disk (fsync)");
  // A quota may be told here only. The descriptor is gone in any case.
  if (files_.close(std::exchange(fd_, -1)) != 0) throw_system_error(path_, "cannot be closed");
}

MappedFile::MappedFile(FileSystem& files, const std::string& path) : files_(files) {
  // Without O_NONBLOCK a named pipe would wait for its writer before size() refuses it.
  const int fd = files.open(path, O_RDONLY | O_NONBLOCK);
  if (fd < 0) throw_system_error(path, "cannot be opened");
  const int64_t size = files.size(fd);
  void* address = size > 0 ? files.map(fd, size) : nullptr;
  const int error = errno;
  files.close(fd);
  if (size < 0 && error == EINVAL) {
    throw CheckpointError(fmt::format("[checkpoint] {}: is not a regular file", path));
  }
  errno = error;
  if (size < 0 || address == MAP_FAILED) throw_system_error(path, "cannot be read");
  bytes_ = {static_cast<const char*>(address), static_cast<size_t>(size)};
}

MappedFile::~MappedFile() {
  if (!bytes_.empty()) files_.unmap(const_cast<char*>(bytes_.data()), bytes_.size());
}

void write_file(FileSystem& files, const std::string& path, std::string_view bytes) {
  OutputFile file(files, path);
  file.write(bytes);
  file.finish();
}

void sync_directory(FileSystem& files, const std::string& path) {
  const int fd = files.open(path, O_RDONLY | O_DIRECTORY);
  if (fd < 0) throw_system_error(path, "cannot be opened");
  const bool done = files.fsync(fd) == 0;
  const int error = errno;
  files.close(fd);
  errno = error;
  if (!done) throw_system_error(path, "cannot be brought to the disk (fsync)");
}

void rename(FileSystem& files, const std::string& from, const std::string& to) {
  if (files.rename(from, to) != 0) {
    throw_system_error(from, fmt::format("cannot be renamed to {}", to));
  }
}

std::vector<std::string> names_in(FileSystem& files, const std::string& path) {
  auto names = files.list(path);
  if (!names) throw_system_error(path, "cannot be listed");
  return std::move(*names);
}

void remove_folder(FileSystem& files, const std::string& path) {
  std::string left;
  int error = 0;
  for (const auto& name : names_in(files, path)) {
    const std::string file = path + "/" + name;
    if (files.unlink(file) == 0 || errno == ENOENT || error != 0) continue;
    left = file;
    error = errno;
  }
  if (error != 0) {
    errno = error;
    throw_system_error(left, "cannot be removed");
  }
  if (files.remove_directory(path) != 0 && errno != ENOENT) {
    throw_system_error(path, "cannot be removed");
  }
}

}  // namespace lockstep::checkpoint
