#include "core/nearest.h"

#include <gtest/gtest.h>

namespace lockstep {
namespace {

TEST(Nearest, MistypedWordsAreFound) {
  const std::vector<std::string> keys = {"seed", "epochs", "batch_size", "learning_rate"};
  EXPECT_EQ(nearest("sed", keys), "seed");
  EXPECT_EQ(nearest("epohcs", keys), "epochs");
  EXPECT_EQ(nearest("learnin_rat", keys), "learning_rate");
  EXPECT_EQ(nearest("Batch_Size", keys), "batch_size");
  EXPECT_EQ(nearest("SEED", keys), "seed");
}

TEST(Nearest, ABeginningWins) {
  EXPECT_EQ(nearest("a100", {"a10", "a100-40gb", "a100-80gb"}), "a100-40gb");
  EXPECT_EQ(nearest("nprocs", {"nnodes", "nproc-per-node"}), "nproc-per-node");
  EXPECT_EQ(nearest("log", {"log-line-prefix-template", "log-dir", "lot"}), "log-dir");
  EXPECT_EQ(nearest("se", {"lr", "seed"}), "seed");
  EXPECT_EQ(nearest("a100", {"a100-40gb", "A100"}), "A100") << "the word itself is nearer";
}

TEST(Nearest, WhatIsFarWasNotMeant) {
  EXPECT_EQ(nearest("report_to", {"epochs", "resume", "seed"}), "");
  EXPECT_EQ(nearest("push_to_hub", {"use_cpu", "epochs"}), "");
  EXPECT_EQ(nearest("cost", {"rooms", "area", "age"}), "");
  EXPECT_EQ(nearest("foo", {"dropout", "model", "format"}), "");
  EXPECT_EQ(nearest("x", {"y", "hidden"}), "");
  EXPECT_EQ(nearest("lr", {"log-dir"}), "");
  EXPECT_EQ(nearest("", {"seed", "x", ""}), "");
  EXPECT_EQ(nearest("seed", {}), "");
}

TEST(Nearest, AHintIsAllOrNothing) {
  EXPECT_EQ(hint_of("sed", {"seed"}), "; the nearest is seed");
  EXPECT_EQ(hint_of("sed", {"seed"}, "; did you mean '", "'?"), "; did you mean 'seed'?");
  EXPECT_EQ(hint_of("foo", {"seed"}, "; did you mean '", "'?"), "");
}

}  // namespace
}  // namespace lockstep
