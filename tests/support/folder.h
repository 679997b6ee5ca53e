// A folder for a test's files, and files read and written whole.
#pragma once

#include <stdlib.h>
#include <unistd.h>

#include <cerrno>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <stdexcept>
#include <string>
#include <system_error>

namespace lockstep::test {

// A new folder, removed with what is in it.
class Folder {
 public:
  // Memory where that is possible: thousands of fsyncs would take minutes on a disk. Disk for
  // programs that are to be run, which a file system in memory may refuse.
  enum class On { Memory, Disk };

  explicit Folder(On on = On::Memory) {
    const bool in_memory = on == On::Memory && access("/dev/shm", W_OK) == 0;
    const std::filesystem::path parent =
        in_memory ? "/dev/shm" : std::filesystem::temp_directory_path();
    // Not called lockstep: tests of faults look for what Lockstep leaves in shared memory.
    path_ = (parent / "test-XXXXXX").string();
    if (mkdtemp(path_.data()) == nullptr) {
      throw std::system_error(errno, std::generic_category(), "mkdtemp " + path_);
    }
  }
  ~Folder() { std::filesystem::remove_all(path_); }
  Folder(const Folder&) = delete;
  Folder& operator=(const Folder&) = delete;

  const std::string& path() const { return path_; }
  std::string operator/(const std::string& name) const { return path_ + "/" + name; }

 private:
  std::string path_;
};

inline std::string contents(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  if (!file) throw std::runtime_error("cannot read " + path);
  return {std::istreambuf_iterator<char>(file), {}};
}

using ::write;  // write(2), which the next one would hide in what is read after it
inline void write(const std::string& path, const std::string& bytes) {
  std::ofstream file(path, std::ios::binary | std::ios::trunc);
  file << bytes;
  file.close();
  if (!file) throw std::runtime_error("cannot write " + path);
}

}  // namespace lockstep::test
