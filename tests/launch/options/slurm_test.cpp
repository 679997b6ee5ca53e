// Launchers that srun or mpirun has started, or in a job of PBS or LSF, by their variables. A real
// Slurm: tests/system/schedulers_test.py.
#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdlib>
#include <fstream>
#include <map>
#include <string>

#include "launch/rendezvous/host.h"
#include "launch/rendezvous/rendezvous.h"
#include "support/folder.h"

namespace lockstep::launch::testing {
namespace {

using ::testing::HasSubstr;

// The second of two launchers, one on each node, for one test.
class SlurmTest : public ::testing::Test {
 protected:
  const test::Folder folder_;
  std::map<std::string, std::string> variables_ = {{"SLURM_JOB_ID", "77"},
                                                   {"SLURM_STEP_ID", "1"},
                                                   {"SLURM_PROCID", "1"},
                                                   {"SLURM_NODEID", "1"},
                                                   {"SLURM_STEP_NUM_TASKS", "2"},
                                                   {"SLURM_STEP_NODELIST", "node[7-8]"},
                                                   {"SLURM_STEP_TASKS_PER_NODE", "1(x2)"},
                                                   {"LOCKSTEP_TOKEN", "0123456789abcdef"}};

  SlurmTest() {
    for (const char* name :
         {"RANK", "OMPI_COMM_WORLD_RANK", "MV2_COMM_WORLD_RANK", "MPI_LOCALNRANKS",
          "LOCKSTEP_TOKEN_FILE", "SLURMD_NODENAME", "SLURM_EXPORT_ENV", "PBS_NODEFILE", "LSB_HOSTS",
          "PMI_SIZE", "OMPI_COMM_WORLD_SIZE", "MV2_COMM_WORLD_SIZE"}) {
      unsetenv(name);
    }
    setenv("SLURM_CONF", (folder_ / "slurm.conf").c_str(), 1);
    std::ofstream(folder_ / "slurm.conf") << "AuthInfo=socket=/no/munge\n";
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

TEST_F(SlurmTest, AnInteractiveShellOfSallocIsNoStep) {
  variables_["SLURM_STEP_ID"] = "4294967290";
  variables_["SLURM_JOB_NUM_NODES"] = "2";
  EXPECT_FALSE(found().has_value());
  EXPECT_THAT(remark_on_slurm(), HasSubstr("which has 2 nodes: all ranks start on this one"));
}

// srun -w node8 -n1 lockstep run ... : -w node7 -n1 lockstep run ...
TEST_F(SlurmTest, ATaskWithAPartOfItsJobsCoresIsToldWhatToWrite) {
  const int own = cores();
  variables_["SLURM_CPUS_ON_NODE"] = std::to_string(own + 2);
  found();
  EXPECT_THAT(remark_on_cores("auto", own),
              HasSubstr(fmt::format("may use {} of the {} cores of its Slurm job on this node, and "
                                    "--nproc-per-node auto starts a rank for each: write srun "
                                    "--cpus-per-task={}",
                                    own, own + 2, own + 2)));
  EXPECT_EQ(remark_on_cores("auto", own + 1), "");  // GPUs
  EXPECT_EQ(remark_on_cores(std::to_string(own), own), "");
  variables_["SLURM_CPUS_ON_NODE"] = std::to_string(own);
  found();
  EXPECT_EQ(remark_on_cores("auto", own), "");
}

TEST_F(SlurmTest, ANodesNumberIsItsPlaceInTheList) {
  variables_["SLURMD_NODENAME"] = "node7";
  const auto rendezvous = found();
  EXPECT_EQ(rendezvous->node_rank, 0);
  EXPECT_THAT(rendezvous->endpoint, ::testing::StartsWith("node7:"));
  variables_["SLURM_STEP_NODELIST"] = "node[5-8]";
  expect_refused("SLURM_STEP_NODELIST=node[5-8] with SLURM_STEP_NUM_TASKS=2");
}

TEST_F(SlurmTest, LaunchersOfMpirunAreRefused) {
  variables_ = {{"OMPI_COMM_WORLD_SIZE", "1"}};
  EXPECT_FALSE(found().has_value());
  EXPECT_NO_THROW(refuse_launchers_of_mpirun());
  const std::map<std::string, std::string> each[] = {{{"OMPI_COMM_WORLD_SIZE", "2"}},
                                                     {{"MV2_COMM_WORLD_SIZE", "2"}},
                                                     {{"PMI_SIZE", "2"}, {"MPI_LOCALNRANKS", "2"}}};
  for (const auto& one : each) {
    for (const auto& [name, value] : one) variables_[name] = value;
    found();
    try {
      refuse_launchers_of_mpirun();
      ADD_FAILURE() << one.begin()->first;
    } catch (const ConfigError& error) {
      EXPECT_THAT(error.what(), HasSubstr("mpirun has started 2 launchers"));
      EXPECT_THAT(error.what(), HasSubstr("write mpirun PROGRAM"));
    }
    for (const auto& [name, value] : one) variables_[name] = "";
  }
  variables_["PMI_SIZE"] = "2";  // of srun --mpi=pmi2
  EXPECT_FALSE(found().has_value());
  EXPECT_NO_THROW(refuse_launchers_of_mpirun());
  variables_["OMPI_COMM_WORLD_SIZE"] = "2";
  variables_["RANK"] = "0";
  EXPECT_FALSE(found().has_value());
  EXPECT_NO_THROW(refuse_launchers_of_mpirun());
}

TEST_F(SlurmTest, AJobOfPbsOrLsfWithSeveralHostsIsToldThatItStartsOnOne) {
  const test::Folder folder;
  std::ofstream(folder / "nodes") << "node1\nnode1\nnode2\n";
  std::ofstream(folder / "node") << "node1\nnode1\n";
  const auto remark = [&](const std::map<std::string, std::string>& variables) {
    variables_ = variables;
    found();
    return remark_on_pbs_and_lsf();
  };
  EXPECT_EQ(remark({}), "");
  EXPECT_THAT(remark({{"PBS_NODEFILE", folder / "nodes"}}),
              HasSubstr("this job has 2 hosts (PBS_NODEFILE): all ranks start on this one; start "
                        "lockstep run --nnodes 2 --rdzv-endpoint HOST:PORT"));
  EXPECT_EQ(remark({{"PBS_NODEFILE", folder / "node"}}), "");
  EXPECT_EQ(remark({{"PBS_NODEFILE", folder / "none"}}), "");
  EXPECT_THAT(remark({{"PBS_NODEFILE", ""}, {"LSB_HOSTS", "a a b c"}}),
              HasSubstr("this job has 3 hosts (LSB_HOSTS)"));
}

TEST_F(SlurmTest, LaunchersInPodsOfATrainingOperatorRunOneJob) {
  variables_ = {{"RANK", "1"},
                {"WORLD_SIZE", "3"},
                {"MASTER_ADDR", "train-master-0"},
                {"MASTER_PORT", "23456"},
                {"LOCKSTEP_TOKEN", "0123456789abcdef"},
                {"LOCAL_RANK", ""}};
  found();
  const auto rendezvous = Rendezvous::from_pods();
  ASSERT_TRUE(rendezvous.has_value());
  EXPECT_EQ(rendezvous->min_nodes, 3);
  EXPECT_EQ(rendezvous->max_nodes, 3);
  EXPECT_EQ(rendezvous->node_rank, 1);
  EXPECT_EQ(rendezvous->endpoint, "train-master-0:23456");
  EXPECT_EQ(remark_on_pods(), "");
  // Without a token they start a job each, with a warning.
  variables_["LOCKSTEP_TOKEN"] = "";
  found();
  EXPECT_FALSE(Rendezvous::from_pods().has_value());
  EXPECT_THAT(remark_on_pods(),
              HasSubstr("RANK=1 and WORLD_SIZE=3 without LOCAL_RANK are those of a pod"));
  // A rank of another launcher.
  variables_["LOCKSTEP_TOKEN"] = "0123456789abcdef";
  variables_["LOCAL_RANK"] = "0";
  found();
  EXPECT_FALSE(Rendezvous::from_pods().has_value());
  EXPECT_EQ(remark_on_pods(), "");
  variables_["LOCAL_RANK"] = "";
  variables_["RANK"] = "3";
  found();
  EXPECT_THROW(Rendezvous::from_pods(), ConfigError);
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
  expect_refused("(with MUNGE on this host they would do without: ");
  variables_["SLURM_EXPORT_ENV"] = "NONE";
  expect_refused("before srun, which passes it on with --export=ALL (SLURM_EXPORT_ENV=NONE keeps");
}

TEST_F(SlurmTest, AMissingVariableIsNamed) {
  variables_["SLURM_STEP_NODELIST"] = "";
  expect_refused("SLURM_STEP_ID is set, but SLURM_STEP_NODELIST is not");
  variables_["SLURM_STEP_NODELIST"] = "node[7-";
  expect_refused("node list 'node[7-'");
}

}  // namespace
}  // namespace lockstep::launch::testing
