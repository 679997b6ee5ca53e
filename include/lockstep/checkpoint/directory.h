// A folder of checkpoints, one job that writes to it, and which of them is the newest.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "lockstep/checkpoint/file_system.h"
#include "lockstep/checkpoint/manifest.h"

namespace lockstep::checkpoint {

// Which checkpoints stay when another one is published: the newest always, and those that any of
// these keeps.
struct Retention {
  int64_t keep_last = 0;   // this many of the newest; 0: all
  int64_t keep_every = 0;  // those whose step is a multiple of it; 0: none for this reason
  // Those with the best value of a metric that save() was given.
  struct Best {
    std::string metric;
    int64_t keep = 1;
    bool higher_is_better = false;
    // What is better than this does not count: a run that went back to an older checkpoint has left
    // it behind.
    std::optional<double> limit = std::nullopt;
  };
  std::optional<Best> best = std::nullopt;
};

// A checkpoint in a directory.
struct Published {
  std::string name;  // of its folder
  int64_t step = 0;
  int64_t save = 0;
  std::map<std::string, double> metrics;
};

// The published ones from the oldest save to the newest. Those whose manifest cannot be read are
// left out, and named in `unreadable`.
struct Listing {
  std::vector<Published> checkpoints;
  std::vector<std::string> unreadable;
};
// What is in a directory; nothing when it is not there. Throws CheckpointError when it cannot be
// listed or is a symbolic link that leads nowhere.
Listing list_checkpoints(const std::string& directory, FileSystem& files = system_files());

// The folder of the newest checkpoint that was published completely, even if a process was killed
// while it saved another; nothing when there is none, or no such directory. Throws CheckpointError,
// which names it, when the newest one cannot be read, and when the directory cannot be listed or is
// a symbolic link that leads nowhere.
std::optional<std::string> newest_checkpoint(const std::string& directory,
                                             FileSystem& files = system_files());

// Those that `retention` does not keep.
std::vector<std::string> to_remove(const std::vector<Published>& checkpoints,
                                   const Retention& retention);

// The directory as its only writer. begin(), then files are written into the folder that it gives,
// then publish(). If that fails or the process is killed in between, checkpoints that were
// published before stay as they are.
class Directory {
 public:
  // Makes the directory where it is missing. Throws CheckpointError when another process writes to
  // it, with its host and number.
  explicit Directory(std::string path, FileSystem& files = system_files());
  ~Directory();
  Directory(const Directory&) = delete;
  Directory& operator=(const Directory&) = delete;

  // The directory, as it was given.
  const std::string& path() const { return path_; }

  // Removes what earlier saves left unfinished, and makes a folder for the files of a new one.
  std::string begin(int64_t step);
  // The files, which are on the disk, and the manifest, whose `save` is set here, become a
  // checkpoint by one rename. Returns its folder.
  std::string publish(Manifest manifest);
  // Removes what begin() made, if it can, in the process that called it.
  void abandon() noexcept;
  // Removes checkpoints, after publish(). Warns of those that cannot be removed.
  void retain(const Retention& retention);

 private:
  void lock();
  void remove(const std::string& name);

  std::string path_;
  FileSystem& files_;
  int lock_ = -1;
  std::string temporary_;  // the folder that begin() made
  int began_in_ = 0;       // which process called it
  std::vector<Published> checkpoints_;
};

}  // namespace lockstep::checkpoint
