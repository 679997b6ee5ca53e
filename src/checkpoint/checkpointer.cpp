#include "lockstep/checkpoint/checkpointer.h"

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <sys/resource.h>

#include <algorithm>
#include <exception>
#include <future>
#include <thread>

#include "checkpoint/format/checksum.h"
#include "checkpoint/format/directory/folder_lock.h"
#include "checkpoint/format/directory/latest.h"
#include "checkpoint/generators.h"
#include "checkpoint/restore.h"
#include "checkpoint/save.h"
#include "comm/text.h"
#include "core/files/lasting_path.h"
#include "core/process/own_process.h"
#include "core/process/thread.h"
#include "core/time_limit.h"
#include "lockstep/core/error.h"
#include "lockstep/core/flight.h"
#include "lockstep/core/log.h"

namespace lockstep::checkpoint {
namespace {

constexpr char kWell = '+', kFailed = '-', kDamaged = 'd';

// What the ranks that failed say; once where all say the same. Empty when none did.
std::string reasons(const std::vector<std::string>& reports) {
  std::string text;
  const bool same = std::all_of(reports.begin(), reports.end(),
                                [&](const std::string& one) { return one == reports.front(); });
  for (size_t rank = 0; rank < reports.size(); ++rank) {
    if (reports[rank].front() == kWell) continue;
    if (same) return reports[rank].substr(1);
    text += fmt::format("{}rank {}: {}", text.empty() ? "" : "\n  ", rank, reports[rank].substr(1));
  }
  return text;
}

void check(const CheckpointerOptions& options) {
  const auto refuse = [](const char* name, int64_t value, const char* what) {
    throw ConfigError(fmt::format("[checkpoint] {} = {}: give {}", name, value, what));
  };
  const auto& [keep_last, keep_every, best] = options.retention;
  if (keep_last < 0) refuse("Retention::keep_last", keep_last, "0, which keeps all, or more");
  if (keep_every < 0) refuse("Retention::keep_every", keep_every, "0, which is none, or more");
  if (best && best->keep < 1) refuse("Retention::Best::keep", best->keep, "1 or more");
  if (best && best->metric.empty()) {
    throw ConfigError("[checkpoint] Retention::Best has no metric: name one that save() is given");
  }
  if (options.timeout.count() <= 0) {
    refuse("CheckpointerOptions::timeout", options.timeout.count(), "1 ms or more");
  }
}

// Throws where not all ranks have prepared the same checkpoint, by what they report of it.
void check_same_checkpoint(const std::vector<std::string>& reports) {
  const auto identity = [&](size_t rank) { return reports[rank].substr(1, Restore::kIdentity); };
  for (size_t rank = 1; rank < reports.size(); ++rank) {
    if (identity(rank) == identity(0)) continue;
    throw CheckpointError(fmt::format(
        "[checkpoint] the ranks would restore different checkpoints, and nothing was restored:\n"
        "  rank 0 has {}\n  rank {} has {}\n"
        "  Give restore() the same checkpoint on all ranks; where hosts have disks of their own, "
        "copy it to each of them",
        reports[0].substr(1 + Restore::kIdentity), rank,
        reports[rank].substr(1 + Restore::kIdentity)));
  }
}

// Of a checkpoint's folder. The directory may have another path on another rank.
std::string folder_name(const std::string& folder) { return folder.substr(folder.rfind('/') + 1); }

// A line that differs between two ranks.
std::string first_difference(const std::vector<std::string>& texts) {
  const auto lines = [](const std::string& text) {
    std::vector<std::string> all;
    for (size_t begin = 0, end; begin < text.size(); begin = end + 1) {
      end = std::min(text.find('\n', begin), text.size());
      all.push_back(text.substr(begin, end - begin));
    }
    return all;
  };
  const auto first = lines(texts[0]);
  for (size_t rank = 1; rank < texts.size(); ++rank) {
    const auto other = lines(texts[rank]);
    for (size_t i = 0; i < std::max(first.size(), other.size()); ++i) {
      const auto at = [i](const auto& all) { return i < all.size() ? all[i] : "nothing more"; };
      if (at(first) == at(other)) continue;
      return fmt::format("\n  rank 0 has {}\n  rank {} has {}", at(first), rank, at(other));
    }
  }
  return "";
}

}  // namespace

struct Checkpointer::Impl {
  // The caller's, so that `if (rank == 0) save()` meets the others' next call and is an error at
  // once.
  comm::Group group;
  // The one that files are written over: the caller's, too, but where a thread writes while
  // training uses that.
  comm::Group writing;
  std::string path;
  CheckpointerOptions options;
  FileSystem& files;
  Tracked tracked = {};
  std::unique_ptr<Directory> directory = {};  // on rank 0, from the first save on
  at::Tensor memory = {};                     // of asynchronous saves
  bool has_looked = false;                    // whether options.each_rank has names that are none
  std::thread thread = {};
  std::future<void> written = {};   // by the thread
  std::exception_ptr failure = {};  // of the thread
  OwnProcess process = {};
  int exceptions = std::uncaught_exceptions();

  EachRank each_rank() const { return {options.each_rank, group.rank()}; }
  comm::CallOptions call(const char* label) const {
    return {.timeout = options.timeout,
            .label = label,
            .advice = "every rank calls save() and restore_latest()"};
  }

  void join() {
    if (!process.is_here()) {
      if (group.size() > 1 || thread.joinable())
        throw ConfigError("[checkpoint] " + process.refusal("Checkpointer"));
      // A child of one rank that saves by itself has all that it needs: the copy is its own.
      process = OwnProcess();
    }
    if (thread.joinable()) thread.join();
    if (failure) std::rethrow_exception(std::exchange(failure, nullptr));
  }

  void warn_of_patterns(const State& state) const {
    for (const auto& pattern : each_rank().unused(state)) {
      std::vector<std::string> names;
      for (const auto& [name, object] : tracked) names.push_back(name);
      log::warn(
          fmt::format("[checkpoint] CheckpointerOptions::each_rank has \"{}\", which is not a "
                      "tensor of what is tracked: {}",
                      pattern, fmt::join(names, ", ")));
    }
  }

  // Of a save that nobody asks about any more.
  static void say_lost(const char* why) {
    log::error(fmt::format("{}\n  Call Checkpointer::finish() at the end: it throws this", why));
  }

  Save agreed(int64_t step, const std::map<std::string, double>& metrics);
  Manifest manifest_of(const State& state, int64_t step) const;
  std::vector<std::string> candidates(const RestoreOptions& restore_options);
  std::optional<Restored> attempt(const std::string& folder, const RestoreOptions& restore_options,
                                  std::string& damage);
};

Manifest Checkpointer::Impl::manifest_of(const State& state, int64_t step) const {
  Manifest manifest{
      .step = step, .world = group.size(), .values = state.values, .aliases = state.aliases};
  for (const auto& piece : state.pieces) {
    manifest.tensors[piece.name] = {dtype_of(piece.dtype), piece.sizes, {}};
  }
  return manifest;
}

// The ranks save the same, and rank 0 has a folder for it.
Save Checkpointer::Impl::agreed(int64_t step, const std::map<std::string, double>& metrics) {
  State state;
  Share share;
  std::string mine, text;
  try {
    if (step < 0)
      throw ConfigError(
          fmt::format("[checkpoint] save() of step {}: a step is not negative", step));
    state = described(tracked, each_rank());
    if (group.rank() == 0 && !std::exchange(has_looked, true)) warn_of_patterns(state);
    text = fmt::format("step {}\n{}\n", step, fmt::join(common_lines(state), "\n"));
    for (const auto& [name, value] : metrics) text += fmt::format("metric {}: {}\n", name, value);
    share = share_of(state, Shard{group.rank(), group.size()});
    if (options.async) {
      copy_into(share, memory);
    } else {
      bring_to_host(share);
    }
    mine = kWell + hex(checksum(text));
    if (group.rank() == 0) {
      if (!directory) directory = std::make_unique<Directory>(path, files);
      mine += folder_name(directory->begin(step));
    }
  } catch (...) {
    mine = kFailed + comm::thrown_text();
  }
  const auto reports = group.all_gather_bytes(mine, call("checkpoint: begins"));
  const auto end = [&](const std::string& fault) {
    if (directory) directory->abandon();
    throw CheckpointError(fmt::format("[checkpoint] step {} was not saved: {}", step, fault));
  };
  bool all_well = true;
  for (const auto& report : reports) all_well = all_well && report.front() == kWell;
  if (!all_well) end(reasons(reports));
  for (const auto& report : reports) {
    if (report.substr(1, 16) == reports[0].substr(1, 16)) continue;
    const auto difference =
        first_difference(group.all_gather_bytes(text, call("checkpoint: differs")));
    const bool is_content = difference.find(" with the bits ") != std::string::npos;
    const bool is_value = difference.find("has value ") != std::string::npos;
    end("the ranks would save different things" + difference +
        (is_content
             ? "\n  Make them the same on all ranks before saving (Ddp::sync_buffers(), "
               "Averager), or name "
               "in CheckpointerOptions::each_rank what each rank has of its own (of a Trainer: in "
               "Saving::each_rank)"
         : is_value ? "\n  Make them the same on all ranks, or keep what each rank has of its own "
                      "in a tensor that "
                      "CheckpointerOptions::each_rank names (of a Trainer: Saving::each_rank)"
                    : ""));
  }
  Save save{.group = writing,
            .timeout = options.timeout,
            .files = &files,
            .directory = directory.get(),
            .retention = options.retention,
            .folder = path + "/" + reports[0].substr(17),
            .manifest = manifest_of(state, step),
            .share = std::move(share)};
  save.manifest.metrics = metrics;
  return save;
}

std::vector<std::string> Checkpointer::Impl::candidates(const RestoreOptions& restore_options) {
  std::string mine(1, kWell);
  if (group.rank() == 0) {
    mend_latest(path, files);
    try {
      if (restore_options.damaged == Damaged::Error) {
        if (const auto newest = newest_checkpoint(path, files)) {
          mine += folder_name(*newest) + '\0';
        }
      } else if (is_there(path, files)) {
        const auto listing = list_checkpoints(path, files);
        for (const auto& name : listing.unreadable) {
          log::warn(
              fmt::format("[checkpoint] {}/{} has no manifest that can be read: an older "
                          "checkpoint is restored",
                          path, name));
        }
        for (auto i = listing.checkpoints.rbegin(); i != listing.checkpoints.rend(); ++i) {
          mine += i->name + '\0';
        }
      }
    } catch (const std::exception& error) {
      mine = kFailed + std::string(error.what());
    }
  }
  const std::string text = group.broadcast_bytes(mine, 0, call("checkpoint: newest"));
  if (text.front() == kFailed) throw CheckpointError(text.substr(1));
  std::vector<std::string> folders;
  for (size_t begin = 1, end; begin < text.size(); begin = end + 1) {
    end = text.find('\0', begin);  // of any other byte there may be one in a path
    folders.push_back(path + "/" + text.substr(begin, end - begin));
  }
  return folders;
}

// Nothing when the checkpoint is damaged; `damage` says how.
std::optional<Restored> Checkpointer::Impl::attempt(const std::string& folder,
                                                    const RestoreOptions& restore_options,
                                                    std::string& damage) {
  Restore restore(tracked, each_rank(), restore_options, files, group.size());
  const auto [fault, reason] = restore.prepare(folder);
  const char kind = fault == Restore::Fault::None      ? kWell
                    : fault == Restore::Fault::Damaged ? kDamaged
                                                       : kFailed;
  auto reports = group.all_gather_bytes(kind + reason, call("checkpoint: compared"));
  bool damaged = false;
  for (const auto& report : reports) damaged = damaged || report.front() == kDamaged;
  if (const auto text = reasons(reports); !text.empty()) {
    if (!damaged) throw CheckpointError(text);
    damage = text;
    return std::nullopt;
  }
  check_same_checkpoint(reports);
  std::string mine(1, kWell);
  try {
    restore.finish();
  } catch (...) {
    mine = kFailed + comm::thrown_text();
  }
  reports = group.all_gather_bytes(mine, call("checkpoint: restored"));
  if (const auto text = reasons(reports); !text.empty()) throw CheckpointError(text);
  return Restored{folder, restore.manifest().step, restore.manifest().metrics};
}

Checkpointer::Checkpointer(const comm::Group& group, std::string directory,
                           CheckpointerOptions options) {
  check(options);
  group.refuse_python_ranks("Checkpointer");
  impl_.reset(new Impl{.group = group,
                       .writing = options.async ? group.split(0, group.rank()) : group,
                       .path = without_end_slash(lasting_path(directory)),
                       .options = options,
                       .files = options.files == nullptr ? system_files() : *options.files});
}

Checkpointer::~Checkpointer() {
  if (!impl_->process.is_here()) {  // the folder of a save is the parent's, which goes on with it
    static_cast<void>(impl_.release());
    return;
  }
  // An exception may come of a rank that is stopped, which is not waited for as a disk is.
  if (std::uncaught_exceptions() > impl_->exceptions && impl_->thread.joinable() &&
      impl_->written.wait_for(bounded(impl_->group.timeout())) != std::future_status::ready) {
    impl_->writing.abort("an exception has ended what saved");
  }
  try {
    impl_->join();
  } catch (const CheckpointError& error) {  // the same on all ranks
    if (impl_->group.rank() == 0) impl_->say_lost(error.what());
  } catch (const std::exception& error) {
    impl_->say_lost(error.what());
  }
}

void Checkpointer::track(const std::string& name, std::shared_ptr<Stateful> object) {
  if (name.empty() || name.find('/') != std::string::npos) {
    throw ConfigError(
        fmt::format("[checkpoint] '{}' cannot be tracked: a name has a letter at "
                    "least, and no '/'",
                    name));
  }
  for (const auto& [known, other] : impl_->tracked) {
    if (known == name) {
      throw ConfigError(
          fmt::format("[checkpoint] '{}' is tracked already: choose another name", name));
    }
  }
  if (object == nullptr) {
    throw ConfigError(
        fmt::format("[checkpoint] '{}' cannot be tracked: it is a null pointer", name));
  }
  const int among = object->divided_among(), ranks = impl_->group.size();
  if (among != 0 && among != ranks) {
    throw ConfigError(
        fmt::format("[checkpoint] '{}' is sharded over {} ranks of {} that save: shard it over "
                    "all of them (ZeroOptimizer's group), or use an Fsdp with shard_ranks, whose "
                    "groups may replicate each other",
                    name, among, ranks));
  }
  impl_->tracked.emplace_back(name, std::move(object));
}

void Checkpointer::track_generators() {
  track("generators", generators(default_generators(), impl_->group));
}
void Checkpointer::track(const std::string& name, const at::Generator& generator) {
  track(name, generators({{"state", generator}}, impl_->group));
}

void Checkpointer::save(int64_t step, std::map<std::string, double> metrics) {
  const flight::Span busy(flight::Activity::Checkpoint);
  impl_->join();
  Save save = impl_->agreed(step, metrics);
  if (!impl_->options.async) return save.run();
  const auto write = [this, save = std::make_shared<const Save>(std::move(save))] {
    try {
      save->run();
    } catch (...) {
      impl_->failure = std::current_exception();
    }
  };
  const auto done = std::make_shared<std::promise<void>>();
  impl_->written = done->get_future();
  try {
    impl_->thread = thread_without_signals([write, done] {
      flight::exclude_this_thread();
      setpriority(PRIO_PROCESS, 0, 10);  // of this thread alone, on Linux
      write();
      done->set_value();
    });
  } catch (const std::system_error&) {
    write();  // the other ranks' threads are waiting for this one
  }
}

void Checkpointer::limit_best(double value) {
  if (auto& best = impl_->options.retention.best) best->limit = value;
}

void Checkpointer::finish() {
  const flight::Span busy(flight::Activity::Checkpoint);
  impl_->join();
}

std::optional<Restored> Checkpointer::restore_latest(const RestoreOptions& options) {
  impl_->join();
  auto folders = impl_->candidates(options);
  while (true) {
    std::string damage;
    for (const auto& folder : folders) {
      if (auto restored = impl_->attempt(folder, options, damage)) return restored;
      if (options.damaged == Damaged::Error) break;
      if (impl_->group.rank() == 0) {
        log::warn(damage + "\n  an older checkpoint is restored");
      }
    }
    if (damage.empty()) return std::nullopt;
    // A job that writes there may have published a newer one since, and removed this one.
    auto now = impl_->candidates(options);
    if (now.empty() || now.front() == folders.front()) throw CheckpointError(damage);
    folders = std::move(now);
  }
}

Restored Checkpointer::restore(const std::string& folder, const RestoreOptions& options) {
  impl_->join();
  std::string damage;
  if (auto restored = impl_->attempt(folder, options, damage)) return *restored;
  throw CheckpointError(damage);
}

}  // namespace lockstep::checkpoint
