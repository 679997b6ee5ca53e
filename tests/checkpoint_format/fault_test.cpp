// F14 and F15: whatever call of a save fails or is the process's last, nothing that was saved is
// lost.
#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <csignal>
#include <cstring>
#include <set>

#include "checkpoint/format/directory/latest.h"
#include "checkpoint_format/faulty_files.h"
#include "checkpoint_format/small_checkpoint.h"
#include "lockstep/checkpoint/error.h"
#include "lockstep/checkpoint/export.h"
#include "lockstep/checkpoint/tensor_files.h"
#include "support/folder.h"
#include "support/thrown.h"

namespace lockstep::test {
namespace {

using checkpoint::Directory;
using checkpoint::newest_checkpoint;
using Fault = FaultyFiles::Fault;

// Two checkpoints of steps 1 and 2, of which the second save is watched and removes the first.
void save_second(const std::string& path, checkpoint::FileSystem& files) {
  Directory directory(path, files);
  save(directory, 2, 2, files);
  directory.retain({.keep_last = 1});
}

void save_first(const std::string& path) {
  Directory directory(path);
  save(directory, 1, 1);
}

int calls_of_a_save() {
  const Folder folder;
  save_first(folder / "ck");
  FaultyFiles files(Fault::None, 0, 0);
  save_second(folder / "ck", files);
  return files.calls();
}

// Complete checkpoints only, `latest` is right once a job has restored, and no litter is left once
// another save has been made.
void expect_intact(const std::string& path, const std::string& what) {
  const auto newest = newest_checkpoint(path);
  ASSERT_TRUE(newest) << what;
  for (const auto& one : checkpoint::list_checkpoints(path).checkpoints) {
    EXPECT_EQ(checkpoint::verify(path + "/" + one.name), std::vector<std::string>()) << what;
    EXPECT_EQ(value_of(path + "/" + one.name), static_cast<float>(one.step)) << what;
  }
  EXPECT_TRUE(checkpoint::list_checkpoints(path).unreadable.empty()) << what;
  checkpoint::mend_latest(path, checkpoint::system_files());
  EXPECT_THAT(checkpoint::verify_directory(path).directory, testing::ElementsAre()) << what;
  {
    Directory directory(path);
    save(directory, 3, 3);
    directory.retain({.keep_last = 1});
  }
  EXPECT_EQ(value_of(*newest_checkpoint(path)), 3) << what;
  EXPECT_THAT(checkpoint::names_in(checkpoint::system_files(), path),
              testing::ElementsAre(".lock", "latest", "step-00000003"))
      << what;
}

TEST(Faults, EveryCallFailsInEveryWay) {
  const int calls = calls_of_a_save();
  ASSERT_GT(calls, 40);
  for (const int error : {EIO, ENOSPC, EDQUOT, 0}) {
    for (const Fault fault : {Fault::Once, Fault::FromThenOn}) {
      for (int at = 0; at < calls; ++at) {
        const Folder folder;
        const std::string path = folder / "ck";
        save_first(path);
        FaultyFiles files(fault, at, error);
        const std::string told = message_of<CheckpointError>([&] { save_second(path, files); });
        const std::string what = fmt::format("{} at call {} ({}){}: {}", std::strerror(error), at,
                                             files.names()[std::min(at, files.calls() - 1)],
                                             fault == Fault::Once ? "" : " and after", told);
        // A short write is no failure: the rest is written next.
        EXPECT_TRUE(error != 0 || told == "nothing") << what;
        if (told == "nothing") {
          EXPECT_EQ(value_of(*newest_checkpoint(path)), 2) << what;
        } else {
          EXPECT_THAT(told, testing::StartsWith("[checkpoint] /")) << what;
        }
        expect_intact(path, what);
        if (testing::Test::HasFailure()) return;
      }
    }
  }
}

// What a test asks for, done by a process that is killed at a call.
TEST(Faults, KilledAtEveryCall) {
  const int calls = calls_of_a_save();
  for (int at = 0; at < calls; ++at) {
    const Folder folder;
    const std::string path = folder / "ck";
    save_first(path);
    const pid_t pid = fork();
    if (pid == 0) {
      FaultyFiles files(Fault::Kill, at, 0);
      save_second(path, files);
      _exit(0);
    }
    int status = 0;
    waitpid(pid, &status, 0);
    ASSERT_TRUE(WIFSIGNALED(status)) << at;
    expect_intact(path, fmt::format("killed at call {}", at));
    if (testing::Test::HasFailure()) return;
  }
}

// The first save of all, into a directory that is not there.
TEST(Faults, KilledInTheFirstSaveThereIsNone) {
  for (int at = 0;; ++at) {
    const Folder folder;
    const std::string path = folder / "a/b/ck";
    const pid_t pid = fork();
    if (pid == 0) {
      FaultyFiles files(Fault::Kill, at, 0);
      Directory directory(path, files);
      save(directory, 2, 2, files);
      _exit(0);
    }
    int status = 0;
    waitpid(pid, &status, 0);
    if (!WIFSIGNALED(status)) break;
    const auto newest = newest_checkpoint(path);
    EXPECT_TRUE(!newest || value_of(*newest) == 2) << at;
    Directory directory(path);
    save(directory, 3, 3);
    EXPECT_EQ(value_of(*newest_checkpoint(path)), 3);
  }
}

TEST(Faults, ReadingFailsByName) {
  const Folder folder;
  const std::string path = folder / "ck";
  save_first(path);
  const std::string one = path + "/step-00000001";
  FaultyFiles counting(Fault::None, 0, 0);
  EXPECT_TRUE(checkpoint::verify(one, counting).empty());
  for (int at = 0; at < counting.calls(); ++at) {
    if (counting.names()[at] == "munmap" || counting.names()[at] == "close") continue;
    FaultyFiles files(Fault::Once, at, EIO);
    const auto findings = checkpoint::verify(one, files);
    ASSERT_EQ(findings.size(), 1u) << at << counting.names()[at];
    EXPECT_THAT(findings[0], testing::AllOf(testing::StartsWith("[checkpoint] " + one),
                                            testing::HasSubstr("Input/output error")));
  }
}

// Three tensors, all elements of which are `value`, as files of at most so many bytes.
void export_to(const std::string& folder, float value, int64_t most,
               checkpoint::FileSystem& files) {
  const std::vector<float> values(10, value);
  std::vector<checkpoint::TensorToWrite> tensors;
  for (const char* name : {"a", "b", "c"}) {
    tensors.push_back({name, dtype("F32"), {10}, bytes_of(values)});
  }
  checkpoint::write_folder(folder, std::move(tensors), {.max_shard_bytes = most},
                           checkpoint::Existing::Replace, files);
}

// The values that the tensors have there; -1 where the folder is refused.
std::set<float> values_in(const std::string& folder) {
  std::set<float> found;
  try {
    const auto files = checkpoint::open_tensors(folder);
    for (const auto& [name, tensor] : files->tensors()) {
      const auto bytes = files->read(name);
      for (size_t at = 0; at < bytes.view().size(); at += sizeof(float)) {
        float value = 0;
        std::memcpy(&value, bytes.view().data() + at, sizeof value);
        found.insert(value);
      }
    }
  } catch (const CheckpointError&) {
    return {-1};
  }
  return found;
}

constexpr std::pair<int64_t, int64_t> kExports[] = {{50, 50}, {50, 1000}, {1000, 50}, {1000, 1000}};

// Whatever call of an export fails, an earlier one is whole until its files are replaced, and is
// never mixed with the new one.
TEST(Faults, AnExportThatFailsLeavesTheEarlierOne) {
  using Values = std::set<float>;
  for (const auto& [before, now] : kExports) {
    for (const Fault fault : {Fault::Once, Fault::FromThenOn}) {
      for (int at = 0, calls = 1; at <= calls; ++at) {
        const Folder folder;
        const std::string path = folder / "hf";
        export_to(path, 1, before, checkpoint::system_files());
        FaultyFiles files(fault, at, ENOSPC);
        const std::string told =
            message_of<CheckpointError>([&] { export_to(path, 2, now, files); });
        calls = files.calls();  // more than `at` while one of them fails
        const auto& names = files.names();
        const std::string what = fmt::format("{} and {}, call {} ({}): {}", before, now, at,
                                             names[std::min<size_t>(at, names.size() - 1)], told);
        const auto failed = names.begin() + std::min<int>(at, files.calls());
        const bool begun = std::any_of(names.begin(), failed, [](const std::string& name) {
          return name == "unlink" || name == "rename";
        });
        const Values found = values_in(path);
        if (told == "nothing") {
          EXPECT_EQ(found, Values{2}) << what;
        } else if (!begun) {
          EXPECT_EQ(found, Values{1}) << what;
        } else {
          EXPECT_THAT(found, testing::AnyOf(Values{1}, Values{2}, Values{-1})) << what;
        }
        export_to(path, 3, now, checkpoint::system_files());
        EXPECT_EQ(values_in(path), Values{3}) << what;
        if (testing::Test::HasFailure()) return;
      }
    }
  }
}

TEST(Faults, AnExportThatIsKilledIsNotMixedWithTheEarlierOne) {
  using Values = std::set<float>;
  for (const auto& [before, now] : kExports) {
    for (int at = 0;; ++at) {
      const Folder folder;
      const std::string path = folder / "hf";
      export_to(path, 1, before, checkpoint::system_files());
      const pid_t pid = fork();
      if (pid == 0) {
        FaultyFiles files(Fault::Kill, at, 0);
        export_to(path, 2, now, files);
        _exit(0);
      }
      int status = 0;
      waitpid(pid, &status, 0);
      if (!WIFSIGNALED(status)) break;
      EXPECT_THAT(values_in(path), testing::AnyOf(Values{1}, Values{2}, Values{-1})) << at;
      export_to(path, 3, now, checkpoint::system_files());
      EXPECT_EQ(values_in(path), Values{3}) << at;
      EXPECT_THAT(checkpoint::names_in(checkpoint::system_files(), path),
                  testing::Each(testing::Not(testing::StartsWith(".tmp-"))))
          << at;
      if (testing::Test::HasFailure()) return;
    }
  }
}

// Of a program that does not ignore the signal (no program of this library's).
TEST(Faults, AFileBeyondTheLimitOfItsSizeIsAnErrorAndNoSignal) {
  const Folder folder;
  save_first(folder / "ck");
  Directory directory(folder / "ck");
  std::signal(SIGXFSZ, SIG_DFL);
  rlimit before{};
  getrlimit(RLIMIT_FSIZE, &before);
  const rlimit small{100, before.rlim_max};
  setrlimit(RLIMIT_FSIZE, &small);
  const std::string error = message_of<CheckpointError>([&] { save(directory, 2, 2); });
  setrlimit(RLIMIT_FSIZE, &before);
  EXPECT_THAT(error, testing::HasSubstr("cannot be written: File too large"));
  sigset_t pending;
  sigpending(&pending);
  EXPECT_EQ(sigismember(&pending, SIGXFSZ), 0);
  EXPECT_EQ(checkpoint::list_checkpoints(folder / "ck").checkpoints.size(), 1U);
}

}  // namespace
}  // namespace lockstep::test
