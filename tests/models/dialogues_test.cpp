#include "lockstep/models/dialogues.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include "lockstep/core/error.h"
#include "support/spawn.h"
#include "support/thrown.h"

namespace lockstep::test {
namespace {

using models::Dialogue;
using models::DialogueOptions;
using models::DialogueSeat;
using models::DialogueTokens;
using models::Transformer;
using models::Written;
using testing::ElementsAre;
using testing::HasSubstr;

using Ids = std::vector<int32_t>;

// Answers every message with tokens that depend on its own number and on what was written.
class Echo : public Dialogue {
 public:
  Echo(int32_t number, int turns, Ids beginning = {})
      : number_(number), turns_(turns), beginning_(std::move(beginning)) {}
  Ids begin() override {
    return beginning_.empty() ? Ids{1, 2, static_cast<int32_t>(3 + number_)} : beginning_;
  }
  Ids answer(std::span<const int32_t> message, Written how) override {
    ends.push_back(how);
    messages.emplace_back(message.begin(), message.end());
    if (how == Written::ContextFull || --turns_ <= 0) return {};
    Ids out(static_cast<size_t>(1 + number_ % 4), 7);
    if (!message.empty()) out.push_back((message.front() + number_) % 50);
    return out;
  }
  std::vector<Written> ends;
  std::vector<Ids> messages;

 private:
  int32_t number_;
  int turns_;
  Ids beginning_;
};

Transformer small_net() {
  torch::manual_seed(3);
  return Transformer({.vocabulary = 50,
                      .layers = 2,
                      .hidden = 32,
                      .heads = 4,
                      .kv_heads = 2,
                      .max_length = 96,
                      .initial_deviation = 0.2});
}

DialogueOptions options() {
  return {.sampling = {.max_new_tokens = 9, .temperature = 1, .stop = {5, 6}}, .context = 96};
}

// The same by whole forward passes, one dialogue at a time.
DialogueTokens plainly(Transformer& net, Dialogue& dialogue, uint64_t seed,
                       const DialogueOptions& o) {
  DialogueTokens out;
  Ids pending = dialogue.begin();
  for (;;) {
    for (const int32_t id : pending) {
      out.ids.push_back(id);
      out.own.push_back(0);
    }
    const auto message = out.ids.size();
    Written how = Written::Complete;
    for (;;) {
      // A dialogue of one: the draw of generate() depends on (seed, sample, position), too.
      const auto next = models::generate(net, {out.ids},
                                         {.max_new_tokens = 1,
                                          .temperature = o.sampling.temperature,
                                          .top_p = o.sampling.top_p,
                                          .seed = seed,
                                          .cached = false});
      out.ids.push_back(next[0][0]);
      out.own.push_back(1);
      if (next[0][0] == 5 || next[0][0] == 6) break;
      how = Written::TooLong;
      if (static_cast<int64_t>(out.ids.size() - message) == o.sampling.max_new_tokens) break;
      how = Written::ContextFull;
      if (static_cast<int64_t>(out.ids.size()) == o.context) break;
      how = Written::Complete;
    }
    const Ids written(out.ids.begin() + static_cast<long>(message), out.ids.end());
    pending = dialogue.answer(written, how);
    if (pending.empty() || how == Written::ContextFull) return out;
    if (static_cast<int64_t>(out.ids.size() + pending.size()) >= o.context) {
      dialogue.answer({}, Written::ContextFull);
      return out;
    }
  }
}

// Rows leave, others take their seats, prompts are shared, long ones are read in pieces.
void equal_whole_passes(const DialogueOptions& o) {
  auto net = small_net();
  std::vector<Echo> together, alone;
  for (int32_t i = 0; i < 12; ++i) {
    for (auto* to : {&together, &alone})
      to->emplace_back(i / 3, 1 + i % 7, i == 8 ? Ids(70, 9) : Ids());
  }
  std::vector<DialogueSeat> seats;
  for (auto& echo : together) seats.push_back({&echo, 100 + seats.size()});
  const auto got = models::hold_dialogues(net, seats, o);
  ASSERT_EQ(got.size(), 12u);
  for (size_t i = 0; i < got.size(); ++i) {
    const auto want = plainly(net, alone[i], 100 + i, o);
    EXPECT_EQ(got[i].ids, want.ids) << i;
    EXPECT_EQ(got[i].own, want.own) << i;
    EXPECT_EQ(together[i].ends, alone[i].ends) << i;
    EXPECT_EQ(together[i].messages, alone[i].messages) << i;
  }
}

TEST(Dialogues, AreThoseOfWholePassesOneByOne) {
  isolated([] { equal_whole_passes(options()); });
}
TEST(Dialogues, TakeTheSeatsOfThoseThatEnd) {
  isolated([] {
    auto o = options();
    o.rows = 3;
    o.chunk = 2;
    equal_whole_passes(o);
  });
}
TEST(Dialogues, AreGreedyWithoutTemperature) {
  isolated([] {
    auto o = options();
    o.sampling.temperature = 0;
    equal_whole_passes(o);
  });
}
TEST(Dialogues, EndWithTheContext) {
  isolated([] {
    auto net = small_net();
    auto o = options();
    o.context = 20;
    o.sampling.stop = {};
    Echo echo(0, 100), roomless(3, 100, Ids(10, 9));
    const auto got = models::hold_dialogues(net, {{&echo, 1}, {&roomless, 2}}, o);
    EXPECT_LE(got[0].ids.size(), 20u);
    EXPECT_EQ(echo.ends.back(), Written::ContextFull);
    EXPECT_EQ(got[1].ids.size(), 19u);  // its answer found no room
    EXPECT_THAT(roomless.ends, ElementsAre(Written::TooLong, Written::ContextFull));
  });
}
// A judge that is a network, and learns, may be on the other side.
TEST(Dialogues, AreCalledWithTheCallersGradients) {
  isolated([] {
    auto net = small_net();
    class : public Dialogue {
     public:
      Ids begin() override { return learn(1); }
      Ids answer(std::span<const int32_t>, Written) override { return learn(turns++); }
      Ids learn(int turn) {
        kept = torch::ones({3});
        loss = (weight * torch::ones({3})).sum();
        if (loss.requires_grad()) loss.backward();
        return turn < 2 ? Ids{1, 2} : Ids{};
      }
      torch::Tensor weight = torch::ones({3}, torch::requires_grad()), kept, loss;
      int turns = 0;
    } judge;
    auto o = options();
    int checks = 0;
    o.check = [&] {
      (judge.weight * judge.kept).sum().backward();
      ++checks;
    };
    models::hold_dialogues(net, {{&judge, 1}}, o);
    EXPECT_EQ(judge.turns, 3);
    EXPECT_GT(checks, 0);
    EXPECT_EQ(judge.weight.grad()[0].item<float>(), static_cast<float>(4 + checks));
    const torch::NoGradGuard none;
    o.check = {};
    judge.turns = 0;
    models::hold_dialogues(net, {{&judge, 1}}, o);
    EXPECT_FALSE(judge.loss.requires_grad());
  });
}
TEST(Dialogues, WithoutRoomAreRefused) {
  isolated([] {
    auto net = small_net();
    auto o = options();
    Echo echo(0, 1, Ids(96, 1));
    EXPECT_THAT(message_of<ConfigError>([&] {
                  models::hold_dialogues(net, {{&echo, 1}}, o);
                }),
                HasSubstr("dialogue 0 begins with 96 tokens; the context is 96"));
    o.context = 97;
    EXPECT_THAT(message_of<ConfigError>([&] {
                  models::hold_dialogues(net, {{&echo, 1}}, o);
                }),
                HasSubstr("max_length = 96"));
  });
}

TEST(Dialogues, WhatNoModelCanReadIsRefused) {
  isolated([] {
    auto net = small_net();
    const auto refused = [&](Dialogue* dialogue, DialogueOptions o) {
      return message_of<ConfigError>([&] { models::hold_dialogues(net, {{dialogue, 1}}, o); });
    };
    Echo beyond(0, 1, Ids{1, 50}), below(0, 1, Ids{-1}), fine(0, 1);
    EXPECT_THAT(refused(&beyond, options()),
                HasSubstr("dialogue 0 has the token 50; the vocabulary is 50"));
    EXPECT_THAT(refused(&below, options()), HasSubstr("has the token -1"));
    EXPECT_THAT(refused(nullptr, options()), HasSubstr("dialogue 0 is a null pointer"));
    auto o = options();
    o.sampling.vocabulary = -1;
    EXPECT_THAT(refused(&fine, o), HasSubstr("vocabulary = -1"));
    class : public Dialogue {
      Ids begin() override { return {1}; }
      Ids answer(std::span<const int32_t>, Written) override { return {7, 99}; }
    } answers_beyond;
    EXPECT_THAT(refused(&answers_beyond, options()), HasSubstr("has the token 99"));
    EXPECT_TRUE(net->is_training());
  });
}

}  // namespace
}  // namespace lockstep::test
