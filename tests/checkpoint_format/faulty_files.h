// File systems that fail.
#pragma once

#include <fcntl.h>
#include <signal.h>
#include <sys/mman.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <map>
#include <string>
#include <vector>

#include "lockstep/checkpoint/file_system.h"

namespace lockstep::test {

// Every call that changes something, or may fail, passes `before`. It does nothing here.
class WatchedFiles : public checkpoint::FileSystem {
 public:
  using Base = checkpoint::FileSystem;
  int open(const std::string& path, int flags) override {
    return before("open") ? Base::open(path, flags) : -1;
  }
  ssize_t write(int fd, const char* bytes, size_t count) override {
    if (before("write")) return Base::write(fd, bytes, count);
    return errno == 0 ? Base::write(fd, bytes, (count + 1) / 2) : -1;
  }
  int fsync(int fd) override { return before("fsync") ? Base::fsync(fd) : -1; }
  // Gone in any case, as on Linux.
  int close(int fd) override {
    const bool fine = before("close");
    const int error = errno;
    Base::close(fd);
    errno = error;
    return fine ? 0 : -1;
  }
  int rename(const std::string& from, const std::string& to) override {
    return before("rename") ? Base::rename(from, to) : -1;
  }
  int unlink(const std::string& path) override {
    return before("unlink") ? Base::unlink(path) : -1;
  }
  int make_directory(const std::string& path) override {
    return before("mkdir") ? Base::make_directory(path) : -1;
  }
  int remove_directory(const std::string& path) override {
    return before("rmdir") ? Base::remove_directory(path) : -1;
  }
  void* map(int fd, size_t bytes) override {
    return before("mmap") ? Base::map(fd, bytes) : MAP_FAILED;
  }
  int unmap(void* address, size_t bytes) override {
    before("munmap");
    return Base::unmap(address, bytes);
  }
  int lock(int fd) override { return before("flock") ? Base::lock(fd) : -1; }
  int64_t size(int fd) override { return before("fstat") ? Base::size(fd) : -1; }
  std::optional<std::vector<std::string>> list(const std::string& path) override {
    if (before("readdir")) return Base::list(path);
    return std::nullopt;
  }

 private:
  // Whether to go on; else errno says how to fail, 0 as a write that is short.
  virtual bool before(const char* call) = 0;
};

// Fails at one call, or from it on, or ends the process there.
class FaultyFiles : public WatchedFiles {
 public:
  enum class Fault { None, Once, FromThenOn, Kill };
  FaultyFiles(Fault fault, int at, int error) : fault_(fault), at_(at), error_(error) {}

  int calls() const { return static_cast<int>(calls_.size()); }
  const std::vector<std::string>& names() const { return calls_; }

 private:
  bool before(const char* call) override {
    const int number = calls();
    calls_.emplace_back(call);
    if (fault_ == Fault::None || number < at_) return true;
    if (fault_ == Fault::Once && number > at_) return true;
    if (fault_ == Fault::Kill) raise(SIGKILL);
    errno = error_;
    return error_ == 0 && std::strcmp(call, "write") != 0;
  }

  Fault fault_;
  int at_, error_;
  std::vector<std::string> calls_;
};

}  // namespace lockstep::test
