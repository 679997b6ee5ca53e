#include "lockstep/data/token_dataset.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <limits>
#include <memory>
#include <set>
#include <string>
#include <vector>

#include "data/files.h"
#include "lockstep/core/error.h"
#include "lockstep/data/loader.h"
#include "support/spawn.h"
#include "support/thrown.h"

namespace lockstep::test {
namespace {

using data::TokenDataset;
using testing::HasSubstr;

// Tokens 1, 2, 3 ... in documents of 7, and 0 behind each.
std::string corpus(const Folder& folder) {
  const std::string path = folder / "corpus";
  text::TokenWriter writer(path, {.vocabulary = 1000, .separator = 0, .shard_tokens = 30});
  int32_t next = 1;
  for (int document = 0; document < 9; ++document) {
    std::vector<int32_t> tokens;
    while (tokens.size() < 7) tokens.push_back(next++);
    writer.add(tokens);
  }
  writer.finish();
  return path;
}

std::vector<int64_t> row(const at::Tensor& x, int64_t i) {
  return {x.const_data_ptr<int64_t>() + i * x.size(1),
          x.const_data_ptr<int64_t>() + (i + 1) * x.size(1)};
}

TEST(TokenDataset, SequencesFollowEachOtherWithinAFile) {
  isolated([] {
    const Folder folder;
    const TokenDataset set(corpus(folder), {.sequence_length = 5});
    // Files of 32, 32 and 8 tokens.
    ASSERT_EQ(set.files().shards(), 3u);
    EXPECT_EQ(set.size(), 6 + 6 + 1);
    const auto batch = set.get_batch({0, 1, 6, 12});
    EXPECT_EQ(row(batch.data, 0), (std::vector<int64_t>{1, 2, 3, 4, 5}));
    EXPECT_EQ(row(batch.target, 0), (std::vector<int64_t>{2, 3, 4, 5, 6}));
    EXPECT_EQ(row(batch.data, 1), (std::vector<int64_t>{6, 7, 0, 8, 9}));
    EXPECT_EQ(row(batch.data, 2), (std::vector<int64_t>{29, 30, 31, 32, 33}));
    EXPECT_EQ(row(batch.target, 3), (std::vector<int64_t>{58, 59, 60, 61, 62}));
    EXPECT_THAT(message_of<DataError>([&] { set.get_batch({13}); }), HasSubstr("13"));
  });
}

TEST(TokenDataset, ADocumentsFirstTokenIsNoTargetWhereBoundariesAreMasked) {
  isolated([] {
    const Folder folder;
    const TokenDataset set(corpus(folder), {.sequence_length = 5, .mask_boundaries = true});
    EXPECT_EQ(row(set.get_batch({1}).target, 0), (std::vector<int64_t>{7, 0, -100, 9, 10}));
  });
}

TEST(TokenDataset, PartsAreForTrainingAndEvaluation) {
  isolated([] {
    const Folder folder;
    const std::string path = corpus(folder);
    const TokenDataset front(path, {.sequence_length = 5, .count = 10}),
        back(path, {.sequence_length = 5, .first = 10});
    EXPECT_EQ(front.size(), 10);
    EXPECT_EQ(back.size(), 3);
    const TokenDataset all(path, {.sequence_length = 5});
    EXPECT_EQ(row(back.get_batch({0}).data, 0), row(all.get_batch({10}).data, 0));
    EXPECT_THAT(message_of<DataError>(
                    [&] { TokenDataset(path, {.sequence_length = 5, .first = 10, .count = 4}); }),
                HasSubstr("13 sequences"));
    const int64_t most = std::numeric_limits<int64_t>::max();
    EXPECT_THAT(message_of<DataError>([&] {
                  TokenDataset(path, {.sequence_length = 5, .first = 10, .count = most});
                }),
                HasSubstr("13 sequences"));
    EXPECT_THAT(message_of<DataError>([&] { TokenDataset(path, {.sequence_length = 50}); }),
                HasSubstr("0 sequences"));
    EXPECT_THAT(message_of<ConfigError>(
                    [&] { TokenDataset(path + "/00000.bin", {.mask_boundaries = true}); }),
                HasSubstr("separator"));
  });
}

TEST(TokenDataset, ALoaderGoesOnWhereItWasOnAnotherNumberOfRanks) {
  const Folder folder;
  const std::string path = corpus(folder);
  spawn(2, [&](World& world) {
    const auto set =
        std::make_shared<const TokenDataset>(path, data::TokenDatasetOptions{.sequence_length = 3});
    Loader loader(set, world, {.batch_size = 2, .seed = 4});
    std::multiset<int64_t> seen;
    int taken = 0;
    data::SamplerState state;
    for (const auto& [ids, targets] : loader.epoch(0)) {
      for (int64_t i = 0; i < ids.size(0); ++i)
        seen.insert(row(ids, i).at(0) * 1000 + row(ids, i).at(1));
      state = loader.state();
      if (++taken == 2) break;
    }
    Loader alone(set, Shard{0, 1}, {.batch_size = 4, .seed = 4});
    alone.restore(state);
    std::multiset<int64_t> rest;
    for (const auto& [ids, targets] : alone.epoch(0)) {
      for (int64_t i = 0; i < ids.size(0); ++i)
        rest.insert(row(ids, i).at(0) * 1000 + row(ids, i).at(1));
    }
    // What both ranks have had, and the rest, are the whole, once each.
    EXPECT_EQ(static_cast<int64_t>(seen.size()) * 2 + static_cast<int64_t>(rest.size()),
              set->size());
    for (const int64_t id : seen) EXPECT_FALSE(rest.contains(id));
  });
}

}  // namespace
}  // namespace lockstep::test
