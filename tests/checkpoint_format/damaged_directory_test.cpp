// F16 for a whole directory of checkpoints: `latest`, files that were swapped between checkpoints,
// and what reading makes of damage that nobody has verified.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <filesystem>
#include <functional>
#include <utility>

#include "checkpoint_format/small_checkpoint.h"
#include "lockstep/checkpoint/error.h"
#include "lockstep/checkpoint/tensor_files.h"
#include "support/folder.h"
#include "support/thrown.h"

namespace lockstep::test {
namespace {

using checkpoint::verify_directory;
using testing::AllOf;
using testing::ElementsAre;
using testing::HasSubstr;

class DamagedDirectory : public testing::Test {
 protected:
  DamagedDirectory() {
    checkpoint::Directory directory(folder_.path());
    one_ = save(directory, 1, 1.5);
    two_ = save(directory, 2, 2.5);
    EXPECT_THAT(all(), ElementsAre());
  }
  // Every finding.
  std::vector<std::string> all() const {
    const auto found = verify_directory(folder_.path());
    auto findings = found.directory;
    for (const auto& [name, of] : found.checkpoints) {
      findings.insert(findings.end(), of.begin(), of.end());
    }
    return findings;
  }

  const Folder folder_;
  const std::vector<std::string> files_{"shard-0-of-2.safetensors", "shard-1-of-2.safetensors",
                                        "manifest.json"};
  std::string one_, two_;
};

TEST_F(DamagedDirectory, EveryBitOfLatestIsFound) {
  const std::string latest = folder_ / "latest", whole = contents(latest);
  for (size_t i = 0; i < whole.size() * 8; ++i) {
    std::string flipped = whole;
    flipped[i / 8] = static_cast<char>(flipped[i / 8] ^ 1 << i % 8);
    write(latest, flipped);
    ASSERT_THAT(all(), ElementsAre(HasSubstr(latest))) << "bit " << i;
    ASSERT_EQ(*checkpoint::newest_checkpoint(folder_.path()), two_) << "bit " << i;
  }
}

TEST_F(DamagedDirectory, WhateverBitIsFlippedNoOtherNumbersAreRead) {
  for (const auto& name : files_) {
    const std::string path = two_ + "/" + name, whole = contents(path);
    size_t refused = 0;
    for (size_t i = 0; i < whole.size() * 8; ++i) {
      std::string flipped = whole;
      flipped[i / 8] = static_cast<char>(flipped[i / 8] ^ 1 << i % 8);
      write(path, flipped);
      try {
        ASSERT_EQ(value_of(two_), 2.5) << name << " bit " << i;
      } catch (const CheckpointError& error) {
        ASSERT_THAT(error.what(), HasSubstr(path)) << "bit " << i;
        ++refused;
      }
    }
    write(path, whole);
    EXPECT_GT(refused, 0u);
  }
  EXPECT_THAT(all(), ElementsAre());
}

// At the `times`-th opening of a file whose path ends so, a job does something first.
class WhileAJobSaves : public checkpoint::FileSystem {
 public:
  WhileAJobSaves(std::string file, int times, std::function<void()> job)
      : file_(std::move(file)), times_(times), job_(std::move(job)) {}
  int open(const std::string& path, int flags) override {
    if (path.ends_with(file_) && --times_ == 0) job_();
    return FileSystem::open(path, flags);
  }
  bool has_come() const { return times_ <= 0; }

 private:
  std::string file_;
  int times_;
  std::function<void()> job_;
};

using Names = std::vector<std::string>;
Names whole_ones(const checkpoint::DirectoryFindings& found) {
  EXPECT_THAT(found.directory, ElementsAre());
  Names names;
  for (const auto& [name, findings] : found.checkpoints) {
    EXPECT_THAT(findings, ElementsAre()) << name;
    names.push_back(name);
  }
  return names;
}

TEST_F(DamagedDirectory, WhatAJobRemovesMeanwhileIsNoDamage) {
  int64_t step = 2;
  for (const auto& [file, times] :
       {std::pair{"shard-0-of-2.safetensors", 1}, std::pair{"shard-1-of-2.safetensors", 1},
        std::pair{"manifest.json", 1}, std::pair{"manifest.json", 2}}) {
    std::string newest;
    WhileAJobSaves files(file, times, [&] {
      checkpoint::Directory directory(folder_.path());
      newest = save(directory, ++step, 3.5);
      directory.retain({.keep_last = 1});  // all that verify_directory() has listed
    });
    const auto names = whole_ones(verify_directory(folder_.path(), files));
    ASSERT_TRUE(files.has_come());
    EXPECT_EQ(names, Names{newest.substr(newest.rfind('/') + 1)}) << file << " " << times;
    checkpoint::Directory directory(folder_.path());
    save(directory, ++step, 1.5);
  }
}

TEST_F(DamagedDirectory, DamageIsFoundWhileAJobRemovesOthers) {
  const std::string path = two_ + "/shard-1-of-2.safetensors", whole = contents(path);
  write(path, whole.substr(0, whole.size() - 1));
  WhileAJobSaves files("shard-1-of-2.safetensors", 1, [&] {
    checkpoint::Directory directory(folder_.path());
    save(directory, 3, 3.5);
    directory.retain({.keep_last = 2});  // not step 1
  });
  const auto found = verify_directory(folder_.path(), files);
  EXPECT_FALSE(found.checkpoints.contains("step-00000001"));
  EXPECT_THAT(found.checkpoints.at("step-00000002"), ElementsAre(HasSubstr("is cut short")));
  EXPECT_THAT(found.directory, ElementsAre());
}

// A save publishes first, and replaces `latest` then.
TEST_F(DamagedDirectory, ASaveThatIsAboutToReplaceLatestIsNoDamage) {
  const std::string latest = folder_ / "latest", older = contents(latest);
  {
    checkpoint::Directory directory(folder_.path());
    save(directory, 3, 3.5);
  }
  const std::string newer = contents(latest);
  write(latest, older);
  WhileAJobSaves files("/latest", 5, [&] { write(latest, newer); });
  EXPECT_EQ(whole_ones(verify_directory(folder_.path(), files)).size(), 3u);
  ASSERT_TRUE(files.has_come());
  // It was killed there.
  write(latest, older);
  EXPECT_THAT(verify_directory(folder_.path()).directory,
              ElementsAre(HasSubstr("the newest that can be read is step-00000003")));
}

TEST_F(DamagedDirectory, FilesSwappedBetweenCheckpoints) {
  for (const auto& name : files_) {
    const std::string a = contents(one_ + "/" + name), b = contents(two_ + "/" + name);
    write(one_ + "/" + name, b);
    write(two_ + "/" + name, a);
    const auto found = verify_directory(folder_.path());
    for (const auto& [checkpoint, findings] : found.checkpoints) {
      EXPECT_FALSE(findings.empty()) << checkpoint << " with the " << name << " of another";
    }
    write(one_ + "/" + name, a);
    write(two_ + "/" + name, b);
  }
}

TEST_F(DamagedDirectory, FilesThatAreEmptyOrAllHole) {
  for (const auto& name : files_) {
    const std::string path = two_ + "/" + name, whole = contents(path);
    for (const size_t size : {size_t{0}, whole.size(), size_t{1} << 20}) {
      write(path, "");
      ASSERT_EQ(truncate(path.c_str(), static_cast<off_t>(size)), 0);
      // latest has the manifest's checksum, too.
      EXPECT_THAT(all(), testing::Contains(HasSubstr(path))) << size;
    }
    write(path, whole);
  }
  EXPECT_THAT(all(), ElementsAre());
}

TEST_F(DamagedDirectory, AManifestOfAnotherVersionIsNamed) {
  write(two_ + "/manifest.json", "{\"format\": \"lockstep-checkpoint\", \"version\": 3}");
  const auto is_named = AllOf(HasSubstr(two_ + "/manifest.json"), HasSubstr("is of version 3"),
                              HasSubstr("reads version 1"));
  EXPECT_THAT(all(), testing::Contains(is_named));
  EXPECT_THAT(message_of<CheckpointError>([&] { checkpoint::newest_checkpoint(folder_.path()); }),
              AllOf(is_named, HasSubstr("is step-00000001")));
}

TEST_F(DamagedDirectory, ACheckpointOfAnotherDirectory) {
  const Folder other;
  {
    checkpoint::Directory directory(other.path());
    save(directory, 7, 7);
  }
  std::filesystem::copy(other / "step-00000007", folder_ / "step-00000007");
  // Whole, but `latest` does not name it, and the second save of this directory is newer.
  EXPECT_THAT(all(), ElementsAre());
  EXPECT_EQ(*checkpoint::newest_checkpoint(folder_.path()), two_);
}

}  // namespace
}  // namespace lockstep::test
