// What a program's own classes describe to a checkpoint: pieces that are wrong are refused by name.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <filesystem>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "lockstep/checkpoint/checkpointer.h"
#include "lockstep/parallel/ddp.h"
#include "lockstep/parallel/hooks.h"
#include "lockstep/parallel/stateful.h"
#include "support/folder.h"
#include "support/spawn.h"
#include "support/thrown.h"

namespace lockstep::test {
namespace {

using checkpoint::Box;
using checkpoint::Held;
using checkpoint::Piece;
using checkpoint::State;
using checkpoint::whole_piece;
using testing::AllOf;
using testing::ElementsAre;
using testing::HasSubstr;

struct Described : checkpoint::Stateful {
  State state(const checkpoint::Names&) const override { return saved; }
  State destination(const checkpoint::Saved&, const checkpoint::Names&) override { return wanted; }
  void restored(const State& state) override { seen = state; }

  State saved, wanted, seen;
};

Piece piece_of(at::Tensor tensor, Box box, Held held = Held::ByAll) {
  return {.name = "a", .dtype = at::kFloat, .sizes = {4}, .parts = {{box, tensor}}, .held = held};
}

// What all ranks say to such a state, saved or, of `wanted`, restored.
void expect_refused(const State& saved, const std::optional<State>& wanted, const char* error) {
  const Folder folder;
  spawn(2, [&](World& world) {
    const auto own = std::make_shared<Described>();
    own->saved = saved;
    Checkpointer checkpoints(world, folder.path());
    checkpoints.track("own", own);
    if (wanted) {
      checkpoints.save(1);
      own->wanted = *wanted;
    }
    EXPECT_THAT(message_of<CheckpointError>(
                    [&] { wanted ? (void)checkpoints.restore_latest() : checkpoints.save(1); }),
                HasSubstr(error));
  });
}

TEST(OwnStateful, WhatEveryRankHasIsGivenWhole) {
  expect_refused({.pieces = {{.name = "a", .dtype = at::kFloat, .sizes = {4}, .parts = {}}}}, {},
                 "own/a: every rank has all of it (Held::ByAll), and gives no part");
  expect_refused({.pieces = {piece_of(at::zeros({2}), {{2}, {2}})}}, {},
                 "gives [2:4]: give the whole as one part, or say Held::InParts");
}

TEST(OwnStateful, PartsHaveTheirBoxesSizesAndDtypeOnBothSides) {
  const State good{.pieces = {whole_piece("a", at::arange(4, at::kFloat))}};
  const auto refused = [&](const Piece& piece, const char* error) {
    expect_refused({.pieces = {piece}}, {}, error);
    expect_refused(good, State{.pieces = {piece}}, error);
  };
  refused(piece_of(at::zeros({4}, at::kDouble), {{0}, {4}}),
          "[0:4] is given by a tensor of float64 [4]");
  refused(piece_of(at::zeros({3}), {{0}, {4}}), "[0:4] is given by a tensor of float32 [3]");
  refused(piece_of(at::zeros({5}), {{0}, {5}}), "[0:5] lies outside of [4]");
  refused(piece_of(at::zeros({1, 2}), {{0, 0}, {1, 2}}), "lies outside of [4]");
  refused(piece_of(at::Tensor(), {{0}, {4}}), "[0:4] is given by an undefined tensor");
  refused(piece_of(at::zeros({4}).to_sparse(), {{0}, {4}}),
          "[0:4] is given by a tensor that is not dense, which no checkpoint has: make it dense");
}

TEST(OwnStateful, SeesTheNamesThatItHasGiven) {
  const Folder folder;
  spawn(2, [&](World& world) {
    const at::Tensor first = at::arange(4, at::kFloat), mine = at::full({1}, world.rank() + 5.0);
    const auto own = std::make_shared<Described>();
    own->saved.pieces = {whole_piece("first", first), whole_piece("mine", mine)};
    own->saved.values = {{"count", int64_t{3}}};
    own->wanted = own->saved;
    own->wanted.pieces.push_back(whole_piece("new", at::ones({2})));
    Checkpointer checkpoints(world, folder.path(), {.each_rank = {"own/mine"}});
    checkpoints.track("own", own);
    checkpoints.save(1);
    first.zero_();
    mine.zero_();
    checkpoints.restore_latest({.allow_missing = {"own/new"}});
    std::vector<std::string> names;
    for (const auto& piece : own->seen.pieces) names.push_back(piece.name);
    EXPECT_THAT(names, ElementsAre("first", "mine"));
    EXPECT_TRUE(at::equal(first, at::arange(4, at::kFloat)));
    EXPECT_EQ(mine.item<float>(), static_cast<float>(world.rank() + 5));
    EXPECT_EQ(own->seen.values.size(), 1U);
  });
}

// Counts its passes, and keeps one number that is the same on all ranks and one that is not.
class Kept : public CommHook {
 public:
  std::string_view name() const override { return "kept"; }
  comm::Work start(const Group& group, const parallel::Bucket& bucket) override {
    if (bucket.last) passes += 1;
    return group.all_reduce(bucket.flat, ReduceOp::Average);
  }
  std::map<std::string, at::Tensor> state() const override {
    return {{"passes", passes.clone()}, {"scale", scale}, {"left", left}};
  }
  void restore(const std::map<std::string, at::Tensor>& state) override {
    passes = state.at("passes");
    scale = state.at("scale");
    left = state.at("left");
  }
  bool is_same_on_all(std::string_view name) const override { return name == "scale"; }
  int64_t bytes_sent() const override { return 0; }

  at::Tensor passes = at::zeros({}, at::kLong);
  at::Tensor scale = at::zeros({1}), left = at::zeros({1});
};

TEST(OwnHook, WithStatesOfDifferentSizesIsRefusedOnAnotherNumberOfRanksAlone) {
  const Folder folder;
  for (const int ranks : {2, 2, 3, 1}) {
    spawn(ranks, [&](World& world) {
      Kept hook;
      Checkpointer checkpoints(world, folder.path());
      int64_t step = 0;
      checkpoints.track("step", step);
      checkpoints.track("hook", stateful(hook, world));
      if (!std::filesystem::exists(folder / "latest")) {
        step = 1;
        hook.left = at::ones({world.rank() + 1});
        return checkpoints.save(1);
      }
      if (ranks == 2) {
        checkpoints.restore_latest();
        EXPECT_EQ(hook.left.numel(), world.rank() + 1);
        return;
      }
      EXPECT_THAT(message_of<CheckpointError>([&] { checkpoints.restore_latest(); }),
                  AllOf(HasSubstr("[kept] 'left' is of shape [1]"), HasSubstr("of [2]"),
                        HasSubstr("restore on 2")));
      EXPECT_EQ(step, 0);
    });
  }
}

// Counts its passes from the first one on.
struct CountsLate : CommHook {
  std::string_view name() const override { return "counts_late"; }
  comm::Work start(const Group& group, const parallel::Bucket& bucket) override {
    if (bucket.last) ++passes;
    return group.all_reduce(bucket.flat, ReduceOp::Average);
  }
  std::map<std::string, at::Tensor> state() const override {
    if (passes == 0) return {};
    return {{"passes", at::scalar_tensor(passes, at::kLong)}};
  }
  void restore(const std::map<std::string, at::Tensor>& state) override {
    passes = state.empty() ? 0 : state.at("passes").item<int64_t>();
  }
  int64_t bytes_sent() const override { return 0; }
  int64_t passes = 0;
};

// What a hook keeps from later passes would go into the first gradients.
TEST(HookState, IsThatOfBeforeTheFirstPassAgain) {
  for (const int restored : {2, 3}) {
    const Folder folder;
    spawn(3, [&](World& world) {
      const Group ranks = world.group().split(world.rank() < restored ? 0 : 1);
      const Group saving = world.group().split(world.rank() < 2 ? 0 : 1);
      const auto run = [&](const Group& group, const auto& body) {
        for (const std::shared_ptr<CommHook>& hook : std::vector<std::shared_ptr<CommHook>>{
                 std::make_shared<TopK>(TopKOptions{.fraction = 0.1}),
                 std::make_shared<CastHook>(at::kBFloat16, CastOptions{.error_feedback = true}),
                 std::make_shared<CountsLate>()}) {
          torch::manual_seed(0);
          torch::nn::Linear net(8, 8);
          const Ddp ddp(net, group, {.hook = hook});
          Checkpointer checkpoints(group, folder / std::string(hook->name()));
          checkpoints.track("hook", stateful(*hook, group));
          const auto pass = [&] {
            net->zero_grad();
            net(torch::full({1, 8}, 1.1 + group.rank())).square().sum().backward();
            return net->weight.grad().clone();
          };
          body(*hook, checkpoints, pass);
        }
      };
      if (world.rank() < 2) {
        run(saving, [](CommHook&, Checkpointer& checkpoints, const auto&) { checkpoints.save(0); });
      }
      world.group().barrier().wait();
      if (world.rank() >= restored) return;
      run(ranks, [](CommHook& hook, Checkpointer& checkpoints, const auto& pass) {
        const at::Tensor first = pass();
        pass();
        ASSERT_FALSE(hook.state().empty());
        checkpoints.restore_latest();
        EXPECT_TRUE(hook.state().empty()) << hook.name();
        EXPECT_TRUE(at::equal(pass(), first)) << hook.name();
      });
    });
  }
}

// As a hook that keeps nothing at all, it may be left out.
TEST(HookState, ThatIsEmptyIsNotUnexpected) {
  const Folder folder;
  spawn(2, [&](World& world) {
    int64_t step = 3;
    for (const bool has_hook : {true, false}) {
      CastHook hook(at::kBFloat16);
      Checkpointer checkpoints(world, folder.path());
      checkpoints.track("step", step);
      if (has_hook) checkpoints.track("hook", stateful(hook, world));
      if (has_hook) checkpoints.save(1);
      step = 0;
      checkpoints.restore_latest();
      EXPECT_EQ(step, 3);
    }
  });
}

TEST(OwnHook, GoesOnOnAnotherNumberOfRanks) {
  const Folder folder;
  for (const int ranks : {2, 3, 1}) {
    spawn(ranks, [&](World& world) {
      torch::nn::Linear net(2, 2);
      const auto hook = std::make_shared<Kept>();
      const Ddp ddp(net, world, {.hook = hook});
      Checkpointer checkpoints(world, folder.path());
      checkpoints.track("hook", stateful(*hook, world));
      if (ranks == 2) {
        for (int pass = 0; pass < 3; ++pass) net(torch::ones({1, 2})).sum().backward();
        hook->scale.fill_(0.1);
        hook->left.fill_(world.rank() + 1.0);
        checkpoints.save(1);
        return;
      }
      checkpoints.restore_latest();
      EXPECT_EQ(hook->passes.item<int64_t>(), 3);
      EXPECT_EQ(hook->scale.item<float>(), 0.1F);
      EXPECT_EQ(hook->left.item<float>(), 1.5F);
    });
  }
}

}  // namespace
}  // namespace lockstep::test
