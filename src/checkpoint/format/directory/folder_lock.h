// One process that writes to a folder.
#pragma once

#include <string>
#include <string_view>

#include "lockstep/checkpoint/file_system.h"

namespace lockstep::checkpoint {

// The kernel's lock of a file in a folder, gone with the process that has it. Who has it stands in
// the file, for people.
class FolderLock {
 public:
  // Makes the folder where it is missing. `about` begins an error, `cure` ends it. Throws
  // CheckpointError when another process has it, with its host and number, or this one itself, of
  // checkpoints with a cure for that; one that is ending is waited for.
  FolderLock(const std::string& folder, std::string_view name, const std::string& about,
             const std::string& cure, FileSystem& files = system_files());
  ~FolderLock();
  FolderLock(FolderLock&& other) noexcept;
  FolderLock& operator=(FolderLock&&) = delete;

  // The lock of a folder of checkpoints, from before the first save on: this process's Directory of
  // it takes it over.
  static FolderLock of_checkpoints(const std::string& folder, FileSystem& files = system_files());

 private:
  int fd_;
  FileSystem* files_;
};

// For a Directory, and for mend_latest(), which a writer waits for: the folder's lock, this
// process's own where there is one that no other Directory uses.
enum class Locker { Writer, Mender };
int lock_checkpoints(const std::string& folder, FileSystem& files, Locker who = Locker::Writer);
void unlock_checkpoints(int fd, FileSystem& files) noexcept;
// Throws CheckpointError when the lock is the folder's no more: its file was removed, alone or with
// the folder, even where there is another now.
void check_lock(int fd, const std::string& folder);

std::string without_end_slash(std::string path);

// With all folders above it, each on the disk.
void make_directories(FileSystem& files, const std::string& path);

}  // namespace lockstep::checkpoint
