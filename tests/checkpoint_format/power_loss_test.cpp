// F15: what a disk holds after a power loss at any moment of a save. Until a file was fsynced its
// bytes may be there in part or not at all; until a folder was, any of the changes of its names may
// be missing. All that this allows is made, and looked at.
#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <filesystem>
#include <map>
#include <memory>
#include <set>

#include "checkpoint_format/small_checkpoint.h"
#include "support/folder.h"

namespace lockstep::test {
namespace {

using checkpoint::Directory;

// What is done to the disk, with paths relative to a root.
struct Change {
  enum Kind { Make, Write, Sync, SyncFolder, Rename, Unlink, MakeFolder, RemoveFolder } kind;
  std::string path, to;
  std::string bytes;
};

class RecordingFiles : public checkpoint::FileSystem {
 public:
  explicit RecordingFiles(std::string root) : root_(std::move(root)) {}
  const std::vector<Change>& changes() const { return changes_; }

  int open(const std::string& path, int flags) override {
    const bool is_new = (flags & O_CREAT) != 0 && !std::filesystem::exists(path);
    const int fd = FileSystem::open(path, flags);
    open_[fd] = relative(path);
    if (is_new) changes_.push_back({Change::Make, relative(path), {}, {}});
    return fd;
  }
  ssize_t write(int fd, const char* bytes, size_t count) override {
    changes_.push_back({Change::Write, open_.at(fd), {}, std::string(bytes, count)});
    return FileSystem::write(fd, bytes, count);
  }
  int fsync(int fd) override {
    const bool folder = std::filesystem::is_directory(root_ + "/" + open_.at(fd));
    changes_.push_back({folder ? Change::SyncFolder : Change::Sync, open_.at(fd), {}, {}});
    return FileSystem::fsync(fd);
  }
  int rename(const std::string& from, const std::string& to) override {
    changes_.push_back({Change::Rename, relative(from), relative(to), {}});
    return FileSystem::rename(from, to);
  }
  int unlink(const std::string& path) override {
    const int result = FileSystem::unlink(path);
    if (result == 0) changes_.push_back({Change::Unlink, relative(path), {}, {}});
    return result;
  }
  int make_directory(const std::string& path) override {
    const int result = FileSystem::make_directory(path);
    if (result == 0) changes_.push_back({Change::MakeFolder, relative(path), {}, {}});
    return result;
  }
  int remove_directory(const std::string& path) override {
    changes_.push_back({Change::RemoveFolder, relative(path), {}, {}});
    return FileSystem::remove_directory(path);
  }

 private:
  std::string relative(const std::string& path) const {
    return path == root_ ? "" : path.substr(root_.size() + 1);
  }
  std::string root_;
  std::map<int, std::string> open_;
  std::vector<Change> changes_;
};

struct Node {
  bool folder = false;
  std::string bytes, on_disk;                          // of a file
  std::map<std::string, std::shared_ptr<Node>> names;  // of a folder
};
using Link = std::shared_ptr<Node>;

// A change of the names of one folder that is not on the disk yet.
struct Pending {
  std::string folder;  // that is to be synced
  Change change;
};

// The disk after the changes, when those of names whose bit is set in `lost` (they are counted from
// the last ones back) were not written.
class Disk {
 public:
  explicit Disk(const std::vector<Change>& changes, const std::set<size_t>& lost) {
    for (size_t i = 0; i < changes.size(); ++i) {
      if (!lost.contains(i)) apply(changes[i], i);
    }
  }

  // How much of a file that was not synced is there.
  enum class Unsynced { Nothing, Half, All };
  void make(const std::string& path, Unsynced unsynced) const { make(root_, path, unsynced); }

 private:
  // The folder that holds a path, and the last name; nothing where the folder was lost.
  std::pair<Link, std::string> find(const std::string& path) const {
    Link node = root_;
    size_t begin = 0;
    for (size_t slash; (slash = path.find('/', begin)) != std::string::npos; begin = slash + 1) {
      const auto next = node->names.find(path.substr(begin, slash - begin));
      if (next == node->names.end()) return {nullptr, ""};
      node = next->second;
    }
    return {node, path.substr(begin)};
  }
  void apply(const Change& change, size_t) {
    const auto [folder, name] = find(change.path);
    if (!folder) return;
    const auto entry = folder->names.find(name);
    const bool there = entry != folder->names.end();
    switch (change.kind) {
      case Change::Make:
      case Change::MakeFolder:
        if (!there) {
          folder->names[name] = std::make_shared<Node>();
          folder->names[name]->folder = change.kind == Change::MakeFolder;
        }
        break;
      case Change::Write:
        if (there) entry->second->bytes += change.bytes;
        break;
      case Change::Sync:
        if (there) entry->second->on_disk = entry->second->bytes;
        break;
      case Change::Rename:
        if (const auto [target, to] = find(change.to); there && target) {
          const Link moved = entry->second;
          folder->names.erase(name);
          target->names[to] = moved;
        }
        break;
      case Change::Unlink:
      case Change::RemoveFolder:
        folder->names.erase(name);
        break;
      case Change::SyncFolder:
        break;
    }
  }
  static void make(const Link& node, const std::string& path, Unsynced unsynced) {
    if (!node->folder) {
      std::string bytes = node->bytes;
      if (unsynced == Unsynced::Nothing) bytes = node->on_disk;
      if (unsynced == Unsynced::Half) {
        const size_t rest = (node->bytes.size() - node->on_disk.size()) / 2;
        bytes = node->bytes.substr(0, node->on_disk.size() + rest);
      }
      write(path, bytes);
      return;
    }
    std::filesystem::create_directory(path);
    for (const auto& [name, child] : node->names) make(child, path + "/" + name, unsynced);
  }

  Link root_ =
      std::make_shared<Node>(Node{.folder = true, .bytes = {}, .on_disk = {}, .names = {}});
};

std::string folder_of(const std::string& path) {
  const size_t slash = path.find_last_of('/');
  return slash == std::string::npos ? "" : path.substr(0, slash);
}

// The changes of names among the first `count` that no fsync of their folder follows. A folder that
// is renamed takes what is pending in it along; its own path is that of the change.
std::vector<size_t> pending(const std::vector<Change>& changes, size_t count) {
  std::vector<size_t> open;
  for (size_t i = 0; i < count; ++i) {
    const auto& change = changes[i];
    if (change.kind == Change::SyncFolder) {
      std::erase_if(open, [&](size_t at) { return folder_of(changes[at].path) == change.path; });
    } else if (change.kind != Change::Write && change.kind != Change::Sync) {
      open.push_back(i);
    }
  }
  return open;
}

// Calls `look` with the folder after every power loss at every moment.
template <class Look>
size_t after_every_power_loss(const std::vector<Change>& changes, const Look& look) {
  size_t disks = 0;
  for (size_t count = 0; count <= changes.size(); ++count) {
    const std::vector<Change> done(changes.begin(), changes.begin() + count);
    const auto open = pending(done, count);
    EXPECT_LE(open.size(), 10u) << "too many to try all";
    for (size_t set = 0; set < size_t{1} << open.size(); ++set) {
      std::set<size_t> lost;
      for (size_t bit = 0; bit < open.size(); ++bit) {
        if ((set >> bit & 1) != 0) lost.insert(open[bit]);
      }
      for (const auto unsynced :
           {Disk::Unsynced::Nothing, Disk::Unsynced::Half, Disk::Unsynced::All}) {
        const Folder folder;
        Disk(done, lost).make(folder / "root", unsynced);
        look(folder / "root/ck", count);
        ++disks;
        if (testing::Test::HasFailure()) return disks;
      }
    }
  }
  return disks;
}

TEST(PowerLoss, NothingPublishedIsLostAndNothingBrokenIsFound) {
  const Folder folder;
  RecordingFiles files(folder.path());
  std::vector<size_t> saved;  // changes until save() returned
  {
    Directory directory(folder / "ck", files);
    for (const int step : {1, 2}) {
      save(directory, step, static_cast<float>(step), files);
      saved.push_back(files.changes().size());
      directory.retain({.keep_last = 1});
    }
  }
  const auto disks =
      after_every_power_loss(files.changes(), [&](const std::string& path, size_t count) {
        const auto newest = checkpoint::newest_checkpoint(path);
        const auto least =
            std::count_if(saved.begin(), saved.end(), [&](size_t at) { return count >= at; });
        const float value = newest ? value_of(*newest) : 0;
        EXPECT_GE(value, static_cast<float>(least)) << "after " << count << " changes";
        if (!newest) return;
        EXPECT_EQ(checkpoint::verify(*newest), std::vector<std::string>()) << count;
        for (const auto& one : checkpoint::list_checkpoints(path).unreadable) {
          ADD_FAILURE() << one << " is published but cannot be read after " << count << " changes";
        }
      });
  EXPECT_GT(disks, 500u);
}

}  // namespace
}  // namespace lockstep::test
