// Launchers that srun has started, by its variables. A real Slurm: tests/system/schedulers_test.py.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdlib>
#include <map>
#include <string>

#include "launch/rendezvous/rendezvous.h"

namespace lockstep::launch::testing {
namespace {

using ::testing::HasSubstr;

// The second of two launchers, one on each node, for one test.
class SlurmTest : public ::testing::Test {
 protected:
  std::map<std::string, std::string> variables_ = {{"SLURM_JOB_ID", "77"},
                                                   {"SLURM_STEP_ID", "1"},
                                                   {"SLURM_PROCID", "1"},
                                                   {"SLURM_NODEID", "1"},
                                                   {"SLURM_STEP_NUM_TASKS", "2"},
                                                   {"SLURM_STEP_NODELIST", "node[7-8]"},
                                                   {"SLURM_STEP_TASKS_PER_NODE", "1(x2)"},
                                                   {"LOCKSTEP_TOKEN", "0123456789abcdef"}};

  SlurmTest() {
    for (const char* name : {"RANK", "OMPI_COMM_WORLD_RANK", "MV2_COMM_WORLD_RANK",
                             "MPI_LOCALNRANKS", "LOCKSTEP_TOKEN_FILE"}) {
      unsetenv(name);
    }
  }
  ~SlurmTest() override {
    for (const auto& [name, value] : variables_) unsetenv(name.c_str());
  }
  std::optional<Rendezvous> found() const {
    for (const auto& [name, value] : variables_) {
      value.empty() ? unsetenv(name.c_str()) : setenv(name.c_str(), value.c_str(), 1);
    }
    return Rendezvous::from_slurm();
  }
  void expect_refused(const std::string& reason) const {
    try {
      found();
      ADD_FAILURE() << "not refused: " << reason;
    } catch (const ConfigError& error) {
      EXPECT_THAT(error.what(), HasSubstr(reason));
    }
  }
};

TEST_F(SlurmTest, OneOnEachNodeMeetsAtTheFirst) {
  const auto rendezvous = found();
  ASSERT_TRUE(rendezvous.has_value());
  EXPECT_EQ(rendezvous->min_nodes, 2);
  EXPECT_EQ(rendezvous->max_nodes, 2);
  EXPECT_EQ(rendezvous->node_rank, 1);
  EXPECT_THAT(rendezvous->endpoint, ::testing::MatchesRegex("node7:2[0-9]{4}"));
  EXPECT_EQ(rendezvous->run_id, "slurm-77.1");
  variables_["SLURM_STEP_ID"] = "2";
  EXPECT_NE(found()->endpoint, rendezvous->endpoint);
}

TEST_F(SlurmTest, ASingleTaskIsAnOrdinaryLauncher) {
  variables_["SLURM_STEP_NUM_TASKS"] = "1";
  EXPECT_FALSE(found().has_value());
  variables_["SLURM_STEP_ID"] = "";  // a batch script's own shell
  variables_["SLURM_STEP_NUM_TASKS"] = "4";
  EXPECT_FALSE(found().has_value());
}

TEST_F(SlurmTest, ABatchScriptOfSeveralNodesIsToldThatItStartsOnOne) {
  const auto remark = [&] {
    found();
    return remark_on_slurm();
  };
  EXPECT_EQ(remark(), "");  // in a step
  variables_["SLURM_JOB_NUM_NODES"] = "2";
  EXPECT_EQ(remark(), "");
  variables_["SLURM_STEP_ID"] = "";
  EXPECT_THAT(remark(), HasSubstr("Slurm job 77, which has 2 nodes: all ranks start on this one; "
                                  "write srun --ntasks-per-node=1 lockstep run"));
  variables_["SLURM_JOB_NUM_NODES"] = "1";
  EXPECT_EQ(remark(), "");
}

TEST_F(SlurmTest, WhatAnInnerLauncherHasStartedIsNoTask) {
  variables_["OMPI_COMM_WORLD_RANK"] = "0";
  EXPECT_FALSE(found().has_value());
}

TEST_F(SlurmTest, SeveralOnANodeAreRefusedWithWhatToWrite) {
  variables_["SLURM_STEP_NUM_TASKS"] = "4";
  variables_["SLURM_STEP_TASKS_PER_NODE"] = "3,1";
  expect_refused(
      "srun has started 4 launchers on 2 nodes (SLURM_STEP_TASKS_PER_NODE=3,1), where one on each "
      "starts all ranks of its node: write srun --ntasks-per-node=1 lockstep run");
}

TEST_F(SlurmTest, AMissingSecretIsRefusedWithWhatToWrite) {
  variables_["LOCKSTEP_TOKEN"] = "";
  expect_refused("write export LOCKSTEP_TOKEN=$(openssl rand -hex 32) before srun");
}

TEST_F(SlurmTest, AMissingVariableIsNamed) {
  variables_["SLURM_STEP_NODELIST"] = "";
  expect_refused("SLURM_STEP_ID is set, but SLURM_STEP_NODELIST is not");
  variables_["SLURM_STEP_NODELIST"] = "node[7-";
  expect_refused("node list 'node[7-'");
}

}  // namespace
}  // namespace lockstep::launch::testing
