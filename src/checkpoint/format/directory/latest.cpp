#include "checkpoint/format/directory/latest.h"

#include <fmt/format.h>

#include <algorithm>
#include <exception>

#include "checkpoint/format/checksum.h"
#include "checkpoint/format/directory/folder_lock.h"
#include "checkpoint/format/directory/names.h"
#include "lockstep/checkpoint/error.h"

namespace lockstep::checkpoint {
namespace {

std::string latest_path(const std::string& directory) {
  return fmt::format("{}/{}", directory, kLatestName);
}

bool holds(const std::string& path, const std::string& text, FileSystem& files) {
  try {
    return MappedFile(files, path).bytes() == text;
  } catch (const CheckpointError&) {
    return false;
  }
}

class MendersLock {
 public:
  MendersLock(const std::string& directory, FileSystem& files)
      : files_(files), fd_(lock_checkpoints(without_end_slash(directory), files, Locker::Mender)) {}
  ~MendersLock() { unlock_checkpoints(fd_, files_); }
  MendersLock(const MendersLock&) = delete;
  MendersLock& operator=(const MendersLock&) = delete;

 private:
  FileSystem& files_;
  int fd_;
};

}  // namespace

std::string manifest_path(const std::string& directory, const std::string& name) {
  return fmt::format("{}/{}/{}", directory, name, kManifestName);
}

std::string latest_text(const std::string& name, std::string_view manifest) {
  return fmt::format("{} {}\n", name, hex(checksum(manifest)));
}

std::optional<std::string> missing_in_latest(const std::string& directory, const Listing& listing,
                                             FileSystem& files) {
  if (listing.checkpoints.empty() || !listing.unreadable.empty()) return std::nullopt;
  const std::string& newest = listing.checkpoints.back().name;
  const MappedFile manifest(files, manifest_path(directory, newest));
  std::string text = latest_text(newest, manifest.bytes());
  if (holds(latest_path(directory), text, files)) return std::nullopt;
  return text;
}

void write_latest(const std::string& directory, const std::string& text, FileSystem& files) {
  const std::string temporary = fmt::format("{}/{}{}", directory, kTemporary, kLatestName);
  write_file(files, temporary, text);
  rename(files, temporary, latest_path(directory));
  sync_directory(files, directory);
}

void mend_latest(const std::string& directory, FileSystem& files) noexcept {
  try {
    const auto names = names_in(files, directory);
    if (std::find(names.begin(), names.end(), kLockName) == names.end()) return;
    if (!missing_in_latest(directory, list_checkpoints(directory, files), files)) return;
    // Its writer mends it. What another saves in this moment is not taken for older.
    const MendersLock lock(directory, files);
    const Listing listing = list_checkpoints(directory, files);
    const auto text = missing_in_latest(directory, listing, files);
    if (text) write_latest(directory, *text, files);
  } catch (const std::exception&) {
    // Restoring does not need it.
  }
}

}  // namespace lockstep::checkpoint
