// F16: whatever happens to a checkpoint's files is found, and named.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <filesystem>

#include "checkpoint_format/small_checkpoint.h"
#include "lockstep/checkpoint/error.h"
#include "support/folder.h"
#include "support/thrown.h"

namespace lockstep::test {
namespace {

using checkpoint::verify;
using testing::AllOf;
using testing::ElementsAre;
using testing::HasSubstr;

constexpr char kFirst[] = "shard-0-of-2.safetensors", kSecond[] = "shard-1-of-2.safetensors";

class Damage : public testing::Test {
 protected:
  Damage() {
    checkpoint::Directory directory(folder_.path());
    one_ = save(directory, 1, 1.5);
    EXPECT_THAT(verify(one_), ElementsAre());
  }
  std::string at(const std::string& name) const { return one_ + "/" + name; }

  const Folder folder_;
  std::string one_;
};

TEST_F(Damage, EveryBitOfEveryFileMatters) {
  for (const std::string name : {kFirst, kSecond, "manifest.json"}) {
    const std::string whole = contents(at(name));
    const auto file =
        checkpoint::parse_safetensors(contents(at(kFirst)), contents(at(kFirst)).size(), "x");
    for (size_t i = 0; i < whole.size() * 8; ++i) {
      std::string flipped = whole;
      flipped[i / 8] = static_cast<char>(flipped[i / 8] ^ 1 << i % 8);
      write(at(name), flipped);
      const auto findings = verify(one_);
      ASSERT_EQ(findings.size(), 1u) << name << " bit " << i;
      ASSERT_THAT(findings[0], HasSubstr(at(name))) << i;
      if (name != kFirst) continue;
      for (const auto& [tensor, place] : file.tensors) {
        const auto byte = static_cast<int64_t>(i / 8);
        if (byte >= place.begin && byte < place.end) {
          ASSERT_THAT(findings[0], HasSubstr("tensor '" + tensor + "' is damaged")) << i;
        }
      }
    }
    write(at(name), whole);
  }
  EXPECT_THAT(verify(one_), ElementsAre());
}

TEST_F(Damage, TruncatedAppendedEmptyMissing) {
  const std::string whole = contents(at(kFirst));
  for (size_t length = 0; length < whole.size(); ++length) {
    write(at(kFirst), whole.substr(0, length));
    ASSERT_THAT(verify(one_), ElementsAre(AllOf(HasSubstr(at(kFirst)), HasSubstr("is cut short"))));
  }
  write(at(kFirst), whole + '\0');
  EXPECT_THAT(verify(one_), ElementsAre(AllOf(HasSubstr(at(kFirst)), HasSubstr("is longer"))));
  std::filesystem::remove(at(kFirst));
  EXPECT_THAT(verify(one_), ElementsAre(AllOf(HasSubstr(at(kFirst)), HasSubstr("No such file"))));
}

TEST_F(Damage, AHoleInPlaceOfData) {
  const auto size = contents(at(kSecond)).size();
  ASSERT_EQ(truncate(at(kSecond).c_str(), size - 8), 0);
  ASSERT_EQ(truncate(at(kSecond).c_str(), size), 0);
  EXPECT_THAT(verify(one_), ElementsAre(AllOf(HasSubstr(kSecond), HasSubstr("tensor 'weight'"))));
}

TEST_F(Damage, SwappedFiles) {
  std::filesystem::rename(at(kFirst), at("x"));
  std::filesystem::rename(at(kSecond), at(kFirst));
  std::filesystem::rename(at("x"), at(kSecond));
  EXPECT_THAT(verify(one_), ElementsAre(HasSubstr(at(kFirst)), HasSubstr(at(kSecond))));
}

// Of equal length and header: the same model, trained further.
TEST_F(Damage, AFileOfAnotherCheckpoint) {
  checkpoint::Directory directory(folder_.path());
  const std::string other = save(directory, 2, 2.5);
  std::filesystem::copy_file(other + "/" + kSecond, at(kSecond),
                             std::filesystem::copy_options::overwrite_existing);
  EXPECT_THAT(verify(one_), ElementsAre(AllOf(HasSubstr(kSecond), HasSubstr("tensor 'weight'"))));
}

TEST_F(Damage, AnEditedTensorAndAFileThatDoesNotBelong) {
  std::string bytes = contents(at(kSecond));
  bytes.back() = 'x';
  write(at(kSecond), bytes);
  write(at("notes.txt"), "mine");
  EXPECT_THAT(verify(one_),
              ElementsAre(AllOf(HasSubstr(kSecond), HasSubstr("tensor 'weight' is damaged")),
                          AllOf(HasSubstr("notes.txt"), HasSubstr("is not of this checkpoint"))));
}

TEST_F(Damage, ManifestMissingEmptyOrAFolder) {
  const std::string manifest = at("manifest.json");
  write(manifest, "");
  EXPECT_THAT(verify(one_), ElementsAre(AllOf(HasSubstr(manifest), HasSubstr("is damaged"))));
  std::filesystem::remove(manifest);
  EXPECT_THAT(verify(one_), ElementsAre(AllOf(HasSubstr(manifest), HasSubstr("No such file"))));
  std::filesystem::create_directory(manifest);
  EXPECT_THAT(verify(one_), ElementsAre(AllOf(HasSubstr(manifest), HasSubstr("Is a directory"))));
}

TEST_F(Damage, IsFoundWhenATensorIsRead) {
  std::string bytes = contents(at(kSecond));
  bytes.back() = 'x';
  write(at(kSecond), bytes);
  EXPECT_THAT(message_of<CheckpointError>([&] { value_of(one_); }),
              AllOf(HasSubstr(at(kSecond)), HasSubstr("tensor 'weight' is damaged"),
                    HasSubstr("Restore another checkpoint")));
}

}  // namespace
}  // namespace lockstep::test
