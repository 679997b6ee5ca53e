#include "lockstep/checkpoint/directory.h"

#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cmath>
#include <filesystem>
#include <set>

#include "checkpoint/format/directory/folder_lock.h"
#include "checkpoint/format/directory/latest.h"
#include "checkpoint/format/directory/names.h"
#include "lockstep/checkpoint/error.h"
#include "lockstep/core/log.h"

namespace lockstep::checkpoint {
namespace {

constexpr int kAttempts = 10;  // a link that leads nowhere is gone each time

// Whether `latest` is whole and of a checkpoint that is. Then one that cannot be read is older,
// since a newer one is published before `latest` is replaced and nothing damages it in that moment.
bool names_a_readable_one(const std::string& directory, const Listing& listing, FileSystem& files) {
  try {
    const MappedFile latest(files, fmt::format("{}/{}", directory, kLatestName));
    const std::string name(latest.bytes().substr(0, latest.bytes().find(' ')));
    const bool listed = std::any_of(listing.checkpoints.begin(), listing.checkpoints.end(),
                                    [&](const auto& one) { return one.name == name; });
    return listed && latest_text(name, MappedFile(files, manifest_path(directory, name)).bytes()) ==
                         latest.bytes();
  } catch (const CheckpointError&) {
    return false;
  }
}

}  // namespace

Listing list_checkpoints(const std::string& directory, FileSystem& files) {
  Listing listing;
  if (!is_there(directory, files)) return listing;
  // As often as a writer may have published one meanwhile and removed what was listed before.
  for (int attempt = 0; attempt < kAttempts; ++attempt) {
    listing = {};
    bool outdated = false;
    for (const auto& name : names_in(files, directory)) {
      if (!name.starts_with(kStep)) continue;
      const std::string path = manifest_path(directory, name);
      try {
        const MappedFile file(files, path);
        const Manifest manifest = manifest_head_from(file.bytes(), "[checkpoint] " + path);
        listing.checkpoints.push_back({name, manifest.step, manifest.save, manifest.metrics});
      } catch (const CheckpointError&) {
        listing.unreadable.push_back(name);
        outdated = outdated || (!files.list(directory + "/" + name) && errno == ENOENT);
      }
    }
    if (!outdated) break;
  }
  std::sort(listing.checkpoints.begin(), listing.checkpoints.end(),
            [](const auto& a, const auto& b) {
              return std::pair(a.save, a.name) < std::pair(b.save, b.name);
            });
  return listing;
}

bool is_there(const std::string& directory, FileSystem& files) {
  if (files.list(directory)) return true;
  if (errno != ENOENT) throw_system_error(directory, "cannot be listed");
  // A run would begin anew where the file system of its checkpoints is not mounted.
  for (std::filesystem::path part = directory; part.has_relative_path();
       part = part.parent_path()) {
    std::error_code is_no_link, ignored;
    const auto target = std::filesystem::read_symlink(part, is_no_link);
    if (is_no_link || std::filesystem::exists(part, ignored)) continue;
    throw CheckpointError(
        fmt::format("[checkpoint] {} is a symbolic link to {}, which is not there: is its file "
                    "system mounted?",
                    part.string(), target.string()));
  }
  return false;
}

std::optional<std::string> newest_checkpoint(const std::string& directory, FileSystem& files) {
  if (!is_there(directory, files)) return std::nullopt;
  const Listing listing = list_checkpoints(directory, files);
  if (!listing.unreadable.empty() && !names_a_readable_one(directory, listing, files)) {
    // It may be the newest. Reading it says what is wrong.
    const std::string path = manifest_path(directory, listing.unreadable.back());
    try {
      const MappedFile file(files, path);
      manifest_from(file.bytes(), "[checkpoint] " + path);
    } catch (const CheckpointError& error) {
      throw CheckpointError(
          fmt::format("{}. The newest readable checkpoint of {} is {}", error.what(), directory,
                      listing.checkpoints.empty() ? "none" : listing.checkpoints.back().name));
    }
  }
  if (listing.checkpoints.empty()) return std::nullopt;
  return directory + "/" + listing.checkpoints.back().name;
}

std::vector<std::string> to_remove(const std::vector<Published>& checkpoints,
                                   const Retention& retention) {
  if (retention.keep_last == 0) return {};
  std::set<std::string> kept;
  for (size_t i = 0; i < checkpoints.size(); ++i) {
    const auto& checkpoint = checkpoints[i];
    const auto newer = static_cast<int64_t>(checkpoints.size() - i) - 1;
    const bool last = newer == 0 || newer < retention.keep_last;
    if (last || (retention.keep_every > 0 && checkpoint.step % retention.keep_every == 0)) {
      kept.insert(checkpoint.name);
    }
  }
  if (retention.best) {
    std::vector<std::pair<double, std::string>> ranked;
    const auto rank = [&](double value) {
      return retention.best->higher_is_better ? -value : value;
    };
    for (auto i = checkpoints.rbegin(); i != checkpoints.rend(); ++i) {
      const auto metric = i->metrics.find(retention.best->metric);
      if (metric == i->metrics.end() || std::isnan(metric->second)) continue;
      const auto& limit = retention.best->limit;
      if (limit && rank(metric->second) < rank(*limit)) continue;
      ranked.emplace_back(rank(metric->second), i->name);
    }
    std::stable_sort(ranked.begin(), ranked.end(),
                     [](const auto& a, const auto& b) { return a.first < b.first; });
    for (size_t i = 0; i < ranked.size() && static_cast<int64_t>(i) < retention.best->keep; ++i) {
      kept.insert(ranked[i].second);
    }
  }
  std::vector<std::string> names;
  for (const auto& checkpoint : checkpoints) {
    if (!kept.contains(checkpoint.name)) names.push_back(checkpoint.name);
  }
  return names;
}

Directory::Directory(std::string path, FileSystem& files)
    : path_(without_end_slash(std::move(path))), files_(files) {
  make_directories(files_, path_);
  lock();
  try {
    Listing listing = list_checkpoints(path_, files_);
    const auto text = missing_in_latest(path_, listing, files_);
    if (text) write_latest(path_, *text, files_);
    checkpoints_ = std::move(listing.checkpoints);
  } catch (...) {
    unlock_checkpoints(lock_, files_);
    throw;
  }
}

Directory::~Directory() {
  abandon();
  if (lock_ >= 0) unlock_checkpoints(lock_, files_);
}

void Directory::lock() { lock_ = lock_checkpoints(path_, files_); }

std::string Directory::begin(int64_t step) {
  abandon();
  const auto names = names_in(files_, path_);
  check_lock(lock_, path_);
  for (const auto& name : names) {
    if (!is_leftover(name)) continue;
    const std::string stale = path_ + "/" + name;
    try {
      if (files_.unlink(stale) != 0) remove_folder(files_, stale);
    } catch (const CheckpointError&) {
      // A rank of an ended job may still write there. The next save tries again.
    }
  }
  const std::string folder =
      fmt::format("{}/{}{}{:08}-{}", path_, kTemporary, kStep, step, random_digits());
  if (files_.make_directory(folder) != 0) throw_system_error(folder, "cannot be made");
  temporary_ = folder;
  began_in_ = ::getpid();
  return folder;
}

std::string Directory::publish(Manifest manifest) {
  manifest.save = checkpoints_.empty() ? 1 : checkpoints_.back().save + 1;
  const std::string text = to_json(manifest);
  // One that cannot be read must not push out those that can.
  manifest_from(text, fmt::format("[checkpoint] what step {} saves", manifest.step));
  write_file(files_, fmt::format("{}/{}", temporary_, kManifestName), text);
  sync_directory(files_, temporary_);
  // A step that is saved again, after a restart from before it, does not replace the earlier one.
  const auto names = names_in(files_, path_);
  const std::string plain = fmt::format("{}{:08}", kStep, manifest.step);
  std::string name = plain;
  for (int again = 1; std::find(names.begin(), names.end(), name) != names.end(); ++again) {
    name = fmt::format("{}.{}", plain, again);
  }
  const std::string folder = path_ + "/" + name;
  check_lock(lock_, path_);
  rename(files_, temporary_, folder);
  temporary_.clear();
  checkpoints_.push_back({name, manifest.step, manifest.save, manifest.metrics});
  sync_directory(files_, path_);
  write_latest(path_, latest_text(name, text), files_);
  return folder;
}

void Directory::abandon() noexcept {
  const std::string begun = std::exchange(temporary_, {});
  // In a child by fork() it is the parent's, which goes on with it.
  if (begun.empty() || began_in_ != ::getpid()) return;
  try {
    remove_folder(files_, begun);
  } catch (const std::exception&) {
    // The next begin() tries again.
  }
}

void Directory::remove(const std::string& name) {
  // Under another name first: what is removed in part must not pass for a checkpoint.
  const std::string own = path_ + "/" + name;
  const std::string doomed = fmt::format("{}/{}{}-{}", path_, kTemporary, name, random_digits());
  const bool is_renamed = files_.rename(own, doomed) == 0;
  if (!is_renamed && errno != ENOENT) {
    throw_system_error(own, fmt::format("cannot be renamed to {}", doomed));
  }
  std::erase_if(checkpoints_, [&](const Published& one) { return one.name == name; });
  if (!is_renamed) return;  // it was removed by another process
  sync_directory(files_, path_);
  remove_folder(files_, doomed);
}

void Directory::retain(const Retention& retention) {
  std::string fault;
  for (const auto& name : to_remove(checkpoints_, retention)) {
    check_lock(lock_, path_);
    try {
      remove(name);
    } catch (const CheckpointError& error) {
      if (fault.empty()) fault = error.what();
    }
  }
  if (!fault.empty()) {
    log::warn(fault + ". What is new is saved; the next save tries again to remove what is old");
  }
}

}  // namespace lockstep::checkpoint
