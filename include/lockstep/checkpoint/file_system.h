// The file system as checkpoints use it: every system call of theirs goes through here.
#pragma once

#include <sys/types.h>

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "lockstep/core/compiler.h"

namespace lockstep::checkpoint {

// Each function is the system call of its name: -1 (map: MAP_FAILED) and errno when it fails. Tests
// put another one in its place that fails, ends the process or records. Any thread may call it.
class FileSystem {
 public:
  virtual ~FileSystem() = default;
  virtual int open(const std::string& path, int flags);  // with O_CLOEXEC; mode 0666

  // The system calls of their names; a folder's are mkdir and rmdir.
  virtual ssize_t write(int fd, const char* bytes, size_t count);
  virtual int fsync(int fd);
  virtual int close(int fd);
  virtual int rename(const std::string& from, const std::string& to);
  virtual int unlink(const std::string& path);
  virtual int make_directory(const std::string& path);
  virtual int remove_directory(const std::string& path);

  virtual void* map(int fd, size_t bytes);         // to read, from the file's begin
  virtual int unmap(void* address, size_t bytes);  // what map() gave
  // What was written of a file may go to the disk before fsync(). It has no failure: it changes
  // nothing but how soon the disk works.
  virtual void begin_writing(int fd, int64_t offset, int64_t bytes);

  virtual int lock(int fd);      // exclusive; fails with EWOULDBLOCK when another has it
  virtual int64_t size(int fd);  // of a file, in bytes
  // The names in a folder, sorted; nothing, and errno, when it fails.
  virtual std::optional<std::vector<std::string>> list(const std::string& path);
};

// The machine's.
FileSystem& system_files();

// A file that is written from beginning to end. Everything throws CheckpointError with the path,
// and what the system says.
class OutputFile {
 public:
  OutputFile(FileSystem& files, std::string path);  // replaces a file that is there
  ~OutputFile();
  OutputFile(const OutputFile&) = delete;
  OutputFile& operator=(const OutputFile&) = delete;

  // Appends. The disk begins with what is written while more follows.
  void write(std::string_view bytes);
  // On the disk, and closed.
  void finish();

 private:
  FileSystem& files_;
  std::string path_;
  int fd_;
  int64_t written_ = 0, begun_ = 0;  // bytes
};

// A file's bytes, mapped to be read. They are read from the disk when they are looked at: a file
// that is cut short, or a disk that fails, while it is mapped ends the process with SIGBUS.
class MappedFile {
 public:
  // Throws CheckpointError when it cannot be opened.
  MappedFile(FileSystem& files, const std::string& path);
  ~MappedFile();
  MappedFile(MappedFile&& other) noexcept
      : files_(other.files_), bytes_(std::exchange(other.bytes_, {})) {}
  MappedFile& operator=(MappedFile&&) = delete;

  // Valid as long as this.
  std::string_view bytes() const { return bytes_; }

 private:
  FileSystem& files_;
  std::string_view bytes_;
};

// What follows throws CheckpointError as above.
// A whole file, which is on the disk afterwards.
void write_file(FileSystem& files, const std::string& path, std::string_view bytes);
// The names in a folder are on the disk.
void sync_directory(FileSystem& files, const std::string& path);
// Renames, and replaces what is there.
void rename(FileSystem& files, const std::string& from, const std::string& to);
// The folder with its files, but for what is gone already. Throws when something of it stays, as a
// folder within it, once all else is removed.
void remove_folder(FileSystem& files, const std::string& path);
// The names in a folder, sorted.
std::vector<std::string> names_in(FileSystem& files, const std::string& path);

// CheckpointError "[checkpoint] /path: cannot be renamed: No space left on device".
[[noreturn]] void throw_system_error(const std::string& path, std::string_view what);

}  // namespace lockstep::checkpoint
