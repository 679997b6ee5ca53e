#include "lockstep/core/place.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <cstdlib>
#include <map>
#include <vector>

#include "core/place/node_list.h"
#include "lockstep/core/error.h"

namespace lockstep {
namespace {

using ::testing::HasSubstr;

using Names = std::vector<std::string>;
using Counts = std::vector<int>;

// What the system under test said, as `scontrol show hostnames` of Slurm 22.05 expands it.
TEST(NodeList, IsExpandedAsSlurmDoes) {
  const std::map<std::string, Names> cases = {
      {"node1", {"node1"}},
      {"node[1-3,5]", {"node1", "node2", "node3", "node5"}},
      {"n[01-03]", {"n01", "n02", "n03"}},
      {"n[9-11]", {"n9", "n10", "n11"}},
      {"n[099-101]", {"n099", "n100", "n101"}},
      {"a[1-2],b7,c[08-11]", {"a1", "a2", "b7", "c08", "c09", "c10", "c11"}},
      {"rack[1-2]n[3-4]", {"rack1n3", "rack1n4", "rack2n3", "rack2n4"}},
      {"10.0.0.[1-3]", {"10.0.0.1", "10.0.0.2", "10.0.0.3"}},
      {"n[2,1]", {"n2", "n1"}},
      {"a,a,b", {"a", "a", "b"}},
  };
  for (const auto& [list, names] : cases) EXPECT_EQ(expand_node_list(list), names) << list;
}

TEST(NodeList, WhatSlurmRefusesIsRefused) {
  for (const char* list :
       {"", ",", "a,", "x[1-2]-ib", "n[1]x", "[1-6:2]", "n[3-1]", "n[]", "n[1-3", "n]", "n[1-]",
        "n[-1]", "n[a]", "n[1-9999999999]", "n[1-99999999]", "n[1-999][1-999]", "a[1-2]b[1-2]c"}) {
    try {
      expand_node_list(list);
      ADD_FAILURE() << list;
    } catch (const ConfigError& error) {
      EXPECT_THAT(error.what(), HasSubstr(std::string("node list '") + list)) << list;
    }
  }
}

TEST(TaskCounts, AreExpanded) {
  EXPECT_EQ(expand_task_counts("2(x3),1"), (Counts{2, 2, 2, 1}));
  EXPECT_EQ(expand_task_counts("3,1"), (Counts{3, 1}));
  for (const char* text :
       {"", "2(", "2(x", "2(x2", "2x2", "2(x2)3", ",", "2,", "-1", "2(x999999999)"}) {
    EXPECT_THROW(expand_task_counts(text), ConfigError) << text;
  }
}

// The variables of a launcher, and of no other, for one test.
class PlaceTest : public ::testing::Test {
 protected:
  PlaceTest() {
    for (const char* name : {"RANK",
                             "WORLD_SIZE",
                             "LOCAL_RANK",
                             "LOCAL_WORLD_SIZE",
                             "MASTER_ADDR",
                             "MASTER_PORT",
                             "TORCHELASTIC_RUN_ID",
                             "TORCHELASTIC_RESTART_COUNT",
                             "OMPI_COMM_WORLD_RANK",
                             "PMI_RANK",
                             "PMI_SIZE",
                             "JSM_NAMESPACE_RANK",
                             "JSM_NAMESPACE_SIZE",
                             "MV2_COMM_WORLD_RANK",
                             "MPI_LOCALNRANKS",
                             "SLURM_STEP_ID",
                             "SLURM_PROCID",
                             "SLURM_JOB_ID",
                             "SLURM_NTASKS",
                             "SLURM_JOB_NUM_NODES",
                             "SLURM_TASK_PID",
                             "SLURM_GTIDS",
                             "SLURMD_NODENAME",
                             "SLURM_STEP_NUM_TASKS",
                             "SLURM_RESTART_COUNT",
                             "PMI_FD",
                             "PMIX_RANK"}) {
      unsetenv(name);
    }
  }
  ~PlaceTest() override {
    for (const auto& name : set_) unsetenv(name.c_str());
  }
  void set(const std::map<std::string, std::string>& variables) {
    for (const auto& [name, value] : variables) {
      setenv(name.c_str(), value.c_str(), 1);
      set_.push_back(name);
    }
  }
  static void expect_refused(const std::string& reason) {
    try {
      place_from_env();
      ADD_FAILURE() << "not refused: " << reason;
    } catch (const ConfigError& error) {
      EXPECT_THAT(error.what(), HasSubstr(reason));
    }
  }
  // What the process is told, in that place.
  static std::string warning() {
    ::testing::internal::CaptureStderr();
    EXPECT_EQ(place_from_env().size, 1);
    return ::testing::internal::GetCapturedStderr();
  }
  // Rank 2 of `srun -N2 -n4`, on the second node.
  std::map<std::string, std::string> task() const {
    return {{"SLURM_JOB_ID", "77"},
            {"SLURM_STEP_ID", "0"},
            {"SLURM_PROCID", "2"},
            {"SLURM_NTASKS", "4"},
            {"SLURM_LOCALID", "0"},
            {"SLURM_NODEID", "1"},
            {"SLURM_STEP_NUM_TASKS", "4"},
            {"SLURM_STEP_NODELIST", "node[7-8]"},
            {"SLURM_STEP_TASKS_PER_NODE", "2(x2)"}};
  }
  std::map<std::string, std::string> open_mpi(int rank, int local, int local_size) const {
    return {{"OMPI_COMM_WORLD_RANK", std::to_string(rank)},
            {"OMPI_COMM_WORLD_SIZE", "4"},
            {"OMPI_COMM_WORLD_LOCAL_RANK", std::to_string(local)},
            {"OMPI_COMM_WORLD_LOCAL_SIZE", std::to_string(local_size)},
            {"PMIX_NAMESPACE", "1416429569"}};
  }

 private:
  Names set_;
};

TEST_F(PlaceTest, NobodyLaunchedIt) {
  const Place place = place_from_env();
  EXPECT_EQ(place.size, 1);
  EXPECT_EQ(place.describe(), "a single process");
}

TEST_F(PlaceTest, TheLaunchersVariables) {
  set({{"RANK", "3"},
       {"WORLD_SIZE", "4"},
       {"LOCAL_RANK", "1"},
       {"LOCAL_WORLD_SIZE", "2"},
       {"MASTER_ADDR", "host1"},
       {"MASTER_PORT", "1234"}});
  EXPECT_EQ(place_from_env().describe(),
            "rank 3 of 4 (the launcher's variables), meeting at host1:1234");
}

TEST_F(PlaceTest, TheTrainingOperatorsVariablesAreRanksOfPods) {
  // Kubeflow's PyTorchJob: one process a pod, no LOCAL_RANK.
  set({{"RANK", "1"},
       {"WORLD_SIZE", "3"},
       {"MASTER_ADDR", "job-master-0"},
       {"MASTER_PORT", "23456"}});
  const Place place = place_from_env();
  EXPECT_EQ(place.rank, 1);
  EXPECT_EQ(place.local_rank, std::nullopt);
  EXPECT_EQ(place.host, "job-master-0");
}

TEST_F(PlaceTest, ATaskOfSlurm) {
  set(task());
  const Place place = place_from_env();
  EXPECT_EQ(place.rank, 2);
  EXPECT_EQ(place.size, 4);
  EXPECT_EQ(place.local_rank, 0);
  EXPECT_EQ(place.local_size, 2);
  EXPECT_EQ(place.host, "node7");
  EXPECT_EQ(place.source, "Slurm");
  EXPECT_GE(place.port, 20000);
  EXPECT_LT(place.port, 30000);
}

TEST_F(PlaceTest, APortBelongsToAStepOfSlurm) {
  set(task());
  const int first = place_from_env().port;
  EXPECT_EQ(place_from_env().port, first);
  set({{"SLURM_STEP_ID", "1"}});
  EXPECT_NE(place_from_env().port, first);
}

TEST_F(PlaceTest, ARequeuedJobIsAnotherAttempt) {
  set(task());
  const std::string first = place_from_env().job;
  set({{"SLURM_RESTART_COUNT", "1"}});
  EXPECT_NE(place_from_env().job, first);
}

TEST_F(PlaceTest, TasksNeedNotBeSpreadEvenly) {
  auto variables = task();
  variables["SLURM_STEP_TASKS_PER_NODE"] = "3,1";
  set(variables);
  EXPECT_EQ(place_from_env().local_size, 1);
}

TEST_F(PlaceTest, ABatchShellIsNoTask) {
  // Its SLURM_PROCID is 0 and its SLURM_NTASKS 4, but it has no step.
  auto variables = task();
  variables.erase("SLURM_STEP_ID");
  variables["SLURM_PROCID"] = "0";
  set(variables);
  EXPECT_THAT(warning(), HasSubstr("a shell of Slurm job 77, not one of its 4 tasks: running as a "
                                   "single process; start the program with srun"));
}

TEST_F(PlaceTest, TheShellsOfSallocAndSbatchAreNoTasks) {
  // A step of one task for Slurm (SLURM_INTERACTIVE_STEP, SLURM_BATCH_SCRIPT).
  for (const char* step : {"4294967290", "4294967291"}) {
    set(task());
    set({{"SLURM_STEP_ID", step}, {"SLURM_PROCID", "0"}, {"SLURM_STEP_NUM_TASKS", "1"}});
    EXPECT_THAT(warning(), HasSubstr("not one of its 4 tasks"));
    EXPECT_EQ(launcher_of_rank(), "");
    unsetenv("SLURM_NTASKS");  // of `salloc -N2`
    set({{"SLURM_JOB_NUM_NODES", "2"}});
    EXPECT_THAT(warning(), HasSubstr("not one of its 2 nodes' tasks"));
  }
}

TEST_F(PlaceTest, TasksOfSrunThatEachTakeThemselvesForAWorldAreTold) {
  set(task());
  set({{"RANK", "0"}, {"WORLD_SIZE", "1"}, {"SLURM_TASK_PID", std::to_string(getpid())}});
  EXPECT_THAT(warning(), HasSubstr("WORLD_SIZE=1, but SLURM_STEP_NUM_TASKS=4: each of the 4 tasks "
                                   "runs as a single process"));
  set({{"SLURM_TASK_PID", std::to_string(getppid())}});  // of a launcher that is the task
  EXPECT_EQ(warning(), "");
}

TEST_F(PlaceTest, RanksOfUnknownLaunchersAreTold) {
  set({{"PMI_RANK", "1"}, {"PMI_SIZE", "2"}});
  EXPECT_THAT(warning(), HasSubstr("PMI_RANK=1 of PMI_SIZE=2 is of a launcher that Lockstep does "
                                   "not know: running as a single process; set RANK, WORLD_SIZE"));
  set({{"PMI_SIZE", "1"}});
  EXPECT_EQ(warning(), "");
  set({{"PMIX_RANK", "3"}});
  EXPECT_THAT(warning(), HasSubstr("PMIX_RANK=3 is of a launcher"));
  set({{"JSM_NAMESPACE_RANK", "0"}, {"JSM_NAMESPACE_SIZE", "6"}});
  EXPECT_THAT(warning(), HasSubstr("JSM_NAMESPACE_RANK=0 of JSM_NAMESPACE_SIZE=6"));
}

// srun -w node8 -n1 PROGRAM : -w node7 -n3 PROGRAM
TEST_F(PlaceTest, AStepsListsAreSortedWhereItsNodesAreNot) {
  auto variables = task();
  variables["SLURM_STEP_TASKS_PER_NODE"] = "3,1";
  variables["SLURMD_NODENAME"] = "node7";  // its second
  variables["SLURM_GTIDS"] = "1,2,3";
  variables["MASTER_ADDR"] = "node8";
  set(variables);
  EXPECT_EQ(place_from_env().local_size, 3);
  unsetenv("MASTER_ADDR");
  expect_refused(
      "rank 0 does not run on node7, the first node of the step, where the others look for it "
      "(SLURM_GTIDS=1,2,3): set MASTER_ADDR");
  set({{"SLURM_PROCID", "0"},
       {"SLURM_NODEID", "0"},
       {"SLURMD_NODENAME", "node8"},
       {"SLURM_GTIDS", "0"}});
  expect_refused("rank 0 runs on node8, not on node7");
}

TEST_F(PlaceTest, RankZeroOnAnotherNodeThanTheFirstIsRefused) {
  auto variables = task();  // -m arbitrary
  variables["SLURM_PROCID"] = "0";
  variables["SLURMD_NODENAME"] = "node8";
  set(variables);
  expect_refused("rank 0 runs on node8, not on node7");
  set({{"MASTER_ADDR", "node8"}});
  EXPECT_EQ(place_from_env().host, "node8");
}

TEST_F(PlaceTest, OneNodeOfSlurmMeetsOnLoopback) {
  auto variables = task();
  variables["SLURM_STEP_TASKS_PER_NODE"] = "4";
  variables["SLURM_NODEID"] = "0";
  set(variables);
  EXPECT_EQ(place_from_env().host, "127.0.0.1");
}

TEST_F(PlaceTest, OneMpiProcessNeedsNoLocalNumbers) {
  set({{"OMPI_COMM_WORLD_RANK", "0"}, {"OMPI_COMM_WORLD_SIZE", "1"}});
  EXPECT_EQ(place_from_env().size, 1);
  EXPECT_EQ(place_from_env().local_rank, 0);
  set({{"OMPI_COMM_WORLD_SIZE", "2"}});
  expect_refused("OMPI_COMM_WORLD_LOCAL_RANK is not");
}

TEST_F(PlaceTest, OpenMpiOnOneHost) {
  set(open_mpi(1, 1, 4));
  const Place place = place_from_env();
  EXPECT_EQ(place.host, "127.0.0.1");
  EXPECT_EQ(place.source, "Open MPI");
  const int port = place.port;
  set({{"OMPI_COMM_WORLD_RANK", "3"}});
  EXPECT_EQ(place_from_env().port, port);
  set({{"PMIX_NAMESPACE", "1416429570"}});
  EXPECT_NE(place_from_env().port, port);
}

TEST_F(PlaceTest, ARankIsKnownBeforeItsMeeting) {
  EXPECT_EQ(launcher_of_rank(), "");
  set(open_mpi(1, 1, 2));  // over several hosts, without an address
  EXPECT_EQ(launcher_of_rank(), "OMPI_COMM_WORLD_RANK is set");
  const Place place = rank_from_env();
  EXPECT_EQ(place.rank, 1);
  EXPECT_EQ(place.size, 4);
  EXPECT_EQ(place.host, "");
}

TEST_F(PlaceTest, ATaskAloneOnItsNodeMayStartRanks) {
  set(task());
  EXPECT_EQ(launcher_of_rank(), "srun has started several tasks on a node");
  set({{"SLURM_STEP_TASKS_PER_NODE", "1(x4)"}});
  EXPECT_EQ(launcher_of_rank(), "");
}

TEST_F(PlaceTest, MpiOverSeveralHostsNeedsAnAddress) {
  set(open_mpi(1, 1, 2));
  expect_refused("WORLD_SIZE=4 needs MASTER_ADDR");
  set({{"MASTER_ADDR", "host1"}});
  EXPECT_EQ(place_from_env().host, "host1");
}

TEST_F(PlaceTest, MpichOnOneHost) {
  set({{"PMI_RANK", "1"}, {"PMI_SIZE", "2"}, {"MPI_LOCALRANKID", "1"}, {"MPI_LOCALNRANKS", "2"}});
  EXPECT_EQ(place_from_env().source, "MPICH");
  EXPECT_EQ(place_from_env().host, "127.0.0.1");
}

TEST_F(PlaceTest, OneOfSeveralLaunchersIsBelieved) {
  // A rank of mpirun inside an allocation sees the daemon's SLURM_PROCID; a rank of `lockstep run`
  // under mpirun sees both.
  set(task());
  set({{"SLURM_PROCID", "0"}});
  set(open_mpi(3, 3, 4));
  EXPECT_EQ(place_from_env().rank, 3);
  set({{"RANK", "1"}, {"WORLD_SIZE", "2"}, {"MASTER_ADDR", "127.0.0.1"}, {"MASTER_PORT", "1"}});
  EXPECT_EQ(place_from_env().size, 2);
}

TEST_F(PlaceTest, TasksOfPmi2AreSlurms) {
  set(task());
  set({{"PMI_RANK", "2"}, {"PMI_SIZE", "4"}});
  EXPECT_EQ(place_from_env().source, "Slurm");
}

TEST_F(PlaceTest, ContradictionsAreRefusedWithBothValues) {
  set({{"RANK", "1"}});
  expect_refused("RANK is set, but WORLD_SIZE is not");
  set({{"WORLD_SIZE", "1"}});
  expect_refused("RANK=1 with WORLD_SIZE=1");
  set({{"WORLD_SIZE", "2"}, {"LOCAL_WORLD_SIZE", "3"}});
  expect_refused("LOCAL_WORLD_SIZE=3 with WORLD_SIZE=2");
  set({{"LOCAL_WORLD_SIZE", "1"}, {"LOCAL_RANK", "1"}});
  expect_refused("LOCAL_RANK=1 with LOCAL_WORLD_SIZE=1");
  set({{"RANK", "x"}});
  expect_refused("RANK='x' is not a whole number");
  unsetenv("RANK");
  unsetenv("WORLD_SIZE");
  set(task());
  set({{"SLURM_STEP_NUM_TASKS", "8"}});
  expect_refused("SLURM_STEP_NUM_TASKS=8 with SLURM_STEP_TASKS_PER_NODE=2(x2), which are 4");
}

TEST_F(PlaceTest, AMissingVariableIsNamed) {
  auto variables = task();
  variables.erase("SLURM_LOCALID");
  set(variables);
  expect_refused("SLURM_PROCID is set, but SLURM_LOCALID is not");
  set(open_mpi(4, 0, 4));
  expect_refused("Open MPI says rank 4 of 4");
}

}  // namespace
}  // namespace lockstep
