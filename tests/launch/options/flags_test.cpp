// The command line of `lockstep`: what is taken, and what is refused with words that help.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "launch/job.h"

namespace lockstep::launch::testing {
namespace {

using ::testing::HasSubstr;
using ::testing::Not;
using ::testing::StartsWith;

void expect_usage_error(const std::vector<std::string>& args, const std::string& reason) {
  const Result result = Job(args).wait();
  EXPECT_EQ(result.exit_code, 2);
  EXPECT_EQ(lines_of(result.err).size(), 1u) << result.err;
  EXPECT_THAT(result.err, HasSubstr(reason));
}

TEST(Flags, AnUnknownOneNamesTheNearest) {
  expect_usage_error({"run", "--nproc_per_nod", "2", "true"},
                     "unknown flag --nproc_per_nod; the nearest is --nproc_per_node");
  expect_usage_error({"run", "--nprocs=2", "true"}, "the nearest is --nproc-per-node");
}
TEST(Flags, AnUnknownCommandNamesTheNearest) {
  expect_usage_error({"runn"}, "unknown command 'runn'; the nearest is run");
}
TEST(Flags, ACommandOfOtherToolsIsToldWhatItIsHere) {
  expect_usage_error({"launch", "--nproc-per-node", "2", "./a"},
                     "unknown command 'launch'; what starts ranks is run; write: lockstep run "
                     "--nproc-per-node 2 ./a\n");
  expect_usage_error({"start"}, "write: lockstep run PROGRAM\n");
  expect_usage_error({"version"}, "unknown command 'version'; write: lockstep --version\n");
  expect_usage_error({"checkpoint", "x"}, "there are inspect, verify, merge, export and diff");
}
TEST(Flags, HelpOfACommandThatThereIsNotStartsNothing) {
  expect_usage_error({"help", "trian"},
                     "unknown command 'trian'; the nearest is train (lockstep --help)\n");
  expect_usage_error({"help", "./a"}, "unknown command './a' (lockstep --help)\n");
  expect_usage_error({"help", "launch"}, "write: lockstep run --help\n");
  expect_usage_error({"help", "--x"}, "unknown flag --x (lockstep --help");
}
TEST(Flags, WordsThatAreTooManyAreNamedInTheirOrder) {
  expect_usage_error({"doctor", "a", "b", "c"}, "arguments were not expected: a b c (lockstep doc");
  expect_usage_error({"doctor", "a"}, "The following argument was not expected: a (lockstep doc");
}
TEST(Flags, NoProgram) { expect_usage_error({"run"}, "no program given"); }
TEST(Flags, NoValue) {
  expect_usage_error({"run", "--nproc-per-node"}, "--nproc-per-node");
  // What follows is not taken for it.
  expect_usage_error({"run", "--log-dir=", "--tee=3", "true"}, "--log-dir= has no value");
  expect_usage_error({"run", "--log-dir", "--tee", "3", "true"},
                     "--log-dir has no value: --tee follows, which is a flag itself");
  expect_usage_error({"run", "--role", "--tee=3", "true"}, "--role has no value");
  expect_usage_error({"run", "--role", "-t", "3", "true"}, "--role has no value: -t follows");
  expect_usage_error({"run", "--role", "--", "true"},
                     "--role has no value: -- follows, which ends the flags (--role=-- where");
  EXPECT_EQ(Job({"run", "--role=-t", "sh", "-c", "echo $ROLE_NAME"}).wait().out, "-t\n");
}
TEST(Flags, WrongCounts) {
  for (const std::string count : {"0", "-1", "two", "1.5", "", "99999999999"}) {
    expect_usage_error({"run", "--nproc-per-node=" + count, "true"}, "--nproc-per-node");
  }
}
TEST(Flags, WrongPort) { expect_usage_error({"run", "--master-port", "65536", "true"}, "65536"); }
TEST(Flags, WrongGrace) { expect_usage_error({"run", "--grace", "-1", "true"}, "--grace"); }
TEST(Flags, GpusAreRefusedWhereThereAreNone) {
  const Result result = Job({"run", "--nproc-per-node", "gpu", "true"},
                            {.environment = {{"CUDA_VISIBLE_DEVICES", ""}}})
                            .wait();
  EXPECT_EQ(result.exit_code, 2);
  EXPECT_THAT(result.err, HasSubstr("no NVIDIA device is visible here"));
}
TEST(Flags, SeveralHostsNeedAPlaceToMeetAndASecret) {
  expect_usage_error({"run", "--nnodes=2", "true"}, "--rdzv-endpoint HOST:PORT");
  expect_usage_error({"run", "--nnodes=2", "--rdzv-endpoint=localhost", "true"},
                     "openssl rand -hex 32");
}
TEST(Flags, WrongWordsAboutHostsAreNamed) {
  expect_usage_error({"run", "--nnodes=0", "true"}, "--nnodes '0'");
  expect_usage_error({"run", "--nnodes=3:2", "true"}, "--nnodes '3:2'");
  expect_usage_error({"run", "--rdzv-backend=etcd", "true"}, "--rdzv-backend etcd");
  expect_usage_error({"run", "--rdzv-conf=join_timeout", "true"}, "KEY=VALUE");
  expect_usage_error({"run", "--rdzv-conf=join_timeouts=3", "true"}, "known are join_timeout");
  expect_usage_error({"run", "--rdzv-conf=join_timeout=soon", "true"}, "give seconds");
  expect_usage_error({"run", "--rdzv-conf=heartbeat_timeout=1,keep_alive_interval=0.9", "true"},
                     "two heartbeats within the timeout");
  expect_usage_error({"run", "--nnodes=2", "--node-rank=2", "true"}, "they count from 0");
  expect_usage_error({"run", "--nnodes=2", "--print-env", "true"}, "leave --nnodes out");
  expect_usage_error({"run", "--nnodes=1:2", "--standalone", "true"}, "--standalone is one host");
}
TEST(Flags, TlsIsForLaunchersAndRanksAlike) {
  EXPECT_THAT(Job({"run", "--tls", "--print-env", "true"}).wait().out, HasSubstr("LOCKSTEP_TLS=1"));
  expect_usage_error({"run", "--tls", "--rdzv-conf=tls=0", "true"},
                     "--tls and --rdzv-conf tls=0 say different things");
  const Result result =
      Job({"run", "--tls", "true"}, {.environment = {{"LOCKSTEP_TLS", "0"}}}).wait();
  EXPECT_EQ(result.exit_code, 2);
  EXPECT_THAT(result.err, HasSubstr("--tls and LOCKSTEP_TLS say different things"));
}
TEST(Flags, OneHostNeedsNoRendezvousWhateverIsSaidAboutIt) {
  EXPECT_EQ(Job({"run", "--nnodes=1", "--rdzv-backend=c10d", "--rdzv-endpoint=localhost:0",
                 "--node_rank=0", "--master-addr=localhost", "echo", "x"})
                .wait()
                .out,
            "x\n");
}
TEST(Flags, WhatIsOnlyForPythonIsRefusedByName) {
  expect_usage_error({"run", "--run-path", "true"},
                     "--run-path (or PET_RUN_PATH) is not supported: "
                     "it is about Python programs");
  expect_usage_error({"run", "-m", "true"}, "--module");
  expect_usage_error({"run", "--logs_specs=x", "true"}, "--logs-specs x");
  expect_usage_error({"run", "--event-log-handler=console", "true"}, "what works: null");
}
TEST(Flags, TorchrunsThatChangeNothingHereAreAccepted) {
  EXPECT_EQ(Job({"run", "--monitor-interval=5", "--start-method", "spawn", "--use-env", "-r0", "-t",
                 "0", "echo", "x"})
                .wait()
                .out,
            "x\n");
  expect_usage_error({"run", "--monitor_interval=0", "true"}, "--monitor-interval");
}

TEST(Flags, BothSpellingsAndTorchrunsHarmlessOnes) {
  for (const char* flag : {"--nproc-per-node=2", "--nproc_per_node=2"}) {
    const Result result =
        Job({"run", "--standalone", "--nnodes=1", "--no_python", flag, "echo", "x"}).wait();
    EXPECT_EQ(lines_of(result.out).size(), 2u) << result.err;
  }
}
TEST(Flags, VariablesStandInForThem) {
  const Result result =
      Job({"run", "echo", "x"}, {.environment = {{"PET_NPROC_PER_NODE", "3"}}}).wait();
  EXPECT_EQ(lines_of(result.out).size(), 3u);
}
TEST(Flags, TrainingOperatorsAndTorchHaveVariablesOfTheirOwn) {
  const Result ranks = Job({"run", "echo", "x"},
                           {.environment = {{"PET_N_PROC_PER_NODE", "3"}, {"PET_STANDALONE", ""}}})
                           .wait();
  EXPECT_EQ(lines_of(ranks.out).size(), 3u) << ranks.err;
  const Result wrong =
      Job({"run", "true"}, {.environment = {{"TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "x"}}}).wait();
  EXPECT_EQ(wrong.exit_code, 2);
  EXPECT_THAT(wrong.err, HasSubstr("--shutdown-timeout: 'x': give seconds"));
  EXPECT_THAT(wrong.err, HasSubstr("(from TORCH_ELASTIC_SHUTDOWN_TIMEOUT)"));
}
TEST(Flags, TorchrunsKeysOfTheRendezvousAreKnown) {
  const auto run = [](const std::string& conf) {
    return Job({"run", "--rdzv-conf=" + conf, "echo", "x"}).wait();
  };
  for (const std::string conf :
       {"close_timeout=30,cas_backoff_max_seconds=0.0,store_type=tcp",
        "keep_alive_interval=5,keep_alive_max_attempt=3", "keep_alive_interval=5"}) {
    EXPECT_EQ(run(conf).out, "x\n") << run(conf).err;
  }
  expect_usage_error({"run", "--rdzv-conf=store_type=file", "true"}, "what works: tcp");
  expect_usage_error({"run", "--rdzv-conf=close_timeout=soon", "true"}, "give seconds");
  expect_usage_error({"run", "--rdzv-conf=keep_alive_max_attempt=0", "true"},
                     "give a number from 1");
  expect_usage_error({"run", "--rdzv-conf=keep_alive_max_attempt=1", "true"},
                     "two heartbeats within the timeout");
  // More than a duration holds.
  expect_usage_error(
      {"run", "--rdzv-conf=keep_alive_interval=10000,keep_alive_max_attempt=1000000", "true"},
      "longer than the 1000000 s that a host may be silent");
}
TEST(Flags, OneComparisonWithGlooAtATime) {
  expect_usage_error({"bench", "all_reduce", "ddp"},
                     "[bench] all_reduce and ddp: give one of them");
  expect_usage_error({"bench", "all_reduc"}, "the nearest is all_reduce");
}
TEST(Flags, VariablesStandInForThoseWithoutAValueToo) {
  const auto run = [](const char* name, const char* value, std::vector<std::string> flags = {}) {
    std::vector<std::string> args = {"run"};
    args.insert(args.end(), flags.begin(), flags.end());
    args.insert(args.end(), {"sh", "-c", "echo started ${LOCKSTEP_TLS-plain} $LOCKSTEP_LOG"});
    return Job(args, {.environment = {{name, value}}}).wait().out;
  };
  EXPECT_EQ(run("PET_TLS", "1"), "started 1\n");
  EXPECT_EQ(run("PET_TLS", "0"), "started plain\n");
  EXPECT_EQ(run("PET_TLS", "1", {"--tls=false"}), "started plain\n");
  EXPECT_EQ(run("PET_VERBOSE", "1"), "started plain info\n");
  EXPECT_THAT(run("PET_DRY_RUN", "1"), StartsWith("1 rank on this host"));
  EXPECT_THAT(run("PET_PRINT_ENV", "1"), HasSubstr("rank 0: RANK=0\n"));
}
TEST(Flags, TheLinePrefixHasTorchrunsVariableAndItsOwn) {
  const auto run = [](std::map<std::string, std::string> environment) {
    return Job({"run", "echo", "x"}, {.environment = std::move(environment)}).wait().out;
  };
  const std::pair<const std::string, std::string> torchruns = {
      "TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE", "<a${rank}> "};
  const std::pair<const std::string, std::string> own = {"PET_LOG_LINE_PREFIX_TEMPLATE",
                                                         "<b${rank}> "};
  EXPECT_EQ(run({torchruns}), "<a0> x\n");
  EXPECT_EQ(run({own}), "<b0> x\n");
  EXPECT_EQ(run({torchruns, own}), "<b0> x\n");
}
TEST(Flags, CpuIsOneRankPerCore) {
  const std::string script = "echo $WORLD_SIZE $(env -u OMP_NUM_THREADS nproc)";
  for (const std::string& line :
       lines_of(Job({"run", "--nproc-per-node=cpu", "sh", "-c", script}).wait().out)) {
    const std::string numbers = line.starts_with('[') ? line.substr(line.find("] ") + 2) : line;
    const size_t space = numbers.find(' ');
    EXPECT_EQ(numbers.substr(0, space), numbers.substr(space + 1));
  }
}
TEST(Flags, ThoseAfterTheProgramAreItsOwn) {
  EXPECT_EQ(Job({"run", "echo", "--nproc_per_node", "3", "--", "-x"}).wait().out,
            "--nproc_per_node 3 -- -x\n");
  EXPECT_EQ(Job({"run", "--nproc-per-node", "1", "--", "printf", "%s", "--help"}).wait().out,
            "--help");
}
TEST(Flags, HelpAndVersionAreNoErrors) {
  EXPECT_THAT(Job({"run", "--help"}).wait().out,
              HasSubstr("Usage: lockstep run [FLAGS] PROGRAM [ARGS]"));
  const Result version = Job({"--version"}).wait();
  EXPECT_EQ(version.exit_code, 0);
  EXPECT_THAT(version.out, StartsWith("lockstep "));
}

TEST(Flags, AFlagWithoutTheCommandSaysWhatToWrite) {
  expect_usage_error({"--nproc-per-node", "2", "./p", "--epochs", "3"},
                     "lockstep run --nproc-per-node 2 ./p --epochs 3");
  expect_usage_error({"./train", "2"}, "lockstep run ./train 2");
  EXPECT_EQ(Job({"--frobnicate"}).wait().exit_code, 2);
  EXPECT_THAT(Job({"help", "run"}).wait().out, HasSubstr("--nproc-per-node N"));
}
TEST(Flags, ThoseOfMpirunSayWhatToWrite) {
  expect_usage_error({"run", "-np", "2", "true"}, "write --nproc-per-node 2");
  expect_usage_error({"run", "-n", "2", "true"}, "write --nproc-per-node 2");
  expect_usage_error({"run", "-n2", "true"}, "write --nproc-per-node 2");
  expect_usage_error({"run", "--np=2", "true"}, "write --nproc-per-node 2");
  expect_usage_error({"run", "-H", "a,b", "true"}, "--nnodes");
  expect_usage_error({"run", "--hostfile=hosts", "true"}, "--nnodes");
  expect_usage_error({"run", "-x", "A=1", "true"}, "the launcher's environment");
  expect_usage_error({"run", "--oversubscribe", "true"}, "leave it out");
  expect_usage_error({"run", "-y", "true"}, "unknown flag -y (lockstep run --help)");
}
TEST(Flags, ThoseOfAccelerateThatAreNotTheLaunchersSayWhose) {
  expect_usage_error({"run", "--num_gpus", "2", "true"}, "write --nproc-per-node 2");
  expect_usage_error({"run", "--gpus=all", "true"}, "write --nproc-per-node N");
  expect_usage_error({"train", "run.yaml", "--gradient_clipping", "1"}, "training.max_grad_norm");
  expect_usage_error({"run", "--use_deepspeed", "true"}, "DeepSpeed is not supported");
  expect_usage_error({"run", "--gradient_accumulation_steps=4", "true"}, "give it to its Trainer");
  expect_usage_error({"train", "run.yaml", "--gradient_accumulation_steps=4"},
                     "write --set training.gradient_accumulation_steps=4");
  expect_usage_error({"run", "--enable_cpu_affinity", "true"}, "write --bind numa");
  expect_usage_error({"run", "--fp8_backend=te", "true"}, "--fp8_backend: fp8 is not supported");
  expect_usage_error({"run", "--dynamo_backend", "inductor", "true"}, "about Python programs");
  expect_usage_error({"run", "--parallelism-config-tp-size=2", "true"}, "divided by Fsdp only");
  expect_usage_error({"run", "--use_megatron_lm", "true"}, "Megatron is not supported");
  expect_usage_error({"run", "--mpirun_hostfile", "hosts", "true"}, "without a launcher");
}
TEST(Flags, ThoseOfOthersMaySayWhatIsSoInAnyCase) {
  const Result result =
      Job({"run", "--dynamo_backend", "no", "--dynamo-backend=NO", "--logs-specs", "default",
           "--parallelism-config-tp-size=1", "--parallelism_config_cp_size", "1", "echo", "x"})
          .wait();
  EXPECT_EQ(result.exit_code, 0) << result.err;
  expect_usage_error({"run", "--logs-specs", "mine", "true"}, "--logs-specs mine");
}
TEST(Flags, AWrongNumberIsToldWhatItMayBe) {
  expect_usage_error({"run", "--max-restarts", "x", "true"},
                     "--max-restarts: 'x': give a whole number from 0 to 1000000");
  expect_usage_error({"run", "--max-restarts", "99999999999", "true"}, "from 0 to 1000000");
  expect_usage_error({"run", "--max-restarts=1.5", "true"}, "from 0 to 1000000");
  expect_usage_error({"run", "--monitor-interval", "-1", "true"},
                     "--monitor-interval: '-1': give seconds, above 0 and at most 86400");
  expect_usage_error({"run", "--grace", "1e400", "true"}, "give seconds, from 0 to 86400");
  expect_usage_error({"run", "--grace", "nan", "true"}, "give seconds, from 0 to 86400");
  expect_usage_error({"run", "--node-rank=-2", "true"}, "--node-rank: '-2'");
  expect_usage_error({"run", "--shutdown-timeout=x", "true"}, "--shutdown-timeout: 'x'");
}
TEST(Flags, AWrongChoiceNamesItsFlag) {
  expect_usage_error({"run", "--mixed-precision", "bf17", "true"},
                     "--mixed-precision: 'bf17': give one of no, fp16, bf16");
  expect_usage_error({"run", "--bind", "core", "true"}, "give one of none, cores, numa");
  expect_usage_error({"run", "--num-processes=0", "true"}, "--num-processes: '0'");
}
TEST(Flags, OfARepeatedOneTheLastCountsAndThatIsSaid) {
  const Result result =
      Job({"run", "--nproc-per-node", "2", "--nproc_per_node=3", "echo", "x"}).wait();
  EXPECT_EQ(lines_of(result.out).size(), 3u) << result.out;
  EXPECT_THAT(result.err, HasSubstr("--nproc-per-node is given 2 times; the last one counts: 3"));
  // Both spellings of the same thing, with different values.
  expect_usage_error({"run", "--grace=1", "--shutdown-timeout=2", "true"},
                     "--grace and --shutdown-timeout");
  expect_usage_error({"run", "--bind=cores", "--numa-binding=node", "true"},
                     "--bind and --numa-binding");
}
TEST(Flags, AConfigurationThatIsNoFileIsRefused) {
  expect_usage_error({"run", "--config-file", "/tmp", "true"}, "it is a directory");
  expect_usage_error({"run", "--config-file", "/no/such", "true"}, "No such file");
}
TEST(Flags, HelpShowsWholeNamesShortOnesAndTheToken) {
  const std::string help = Job({"run", "--help"}).wait().out;
  for (const char* part : {"-h, --help", "--nnodes N|MIN:MAX", "--rdzv-endpoint HOST:PORT",
                           "-r, --redirects WHICH", "-t, --tee WHICH", "LOCKSTEP_TOKEN_FILE"}) {
    EXPECT_THAT(help, HasSubstr(part));
  }
  for (const char* hidden : {"--mixed-precision", "--numa-binding HOW", "--run-path", "Hidden"}) {
    EXPECT_THAT(help, Not(HasSubstr(hidden)));
  }
}
TEST(Flags, ADryRunOnSeveralHostsSaysWhereTheyMeet) {
  expect_usage_error({"run", "--nnodes=2", "--dry-run", "true"}, "need a place to meet");
  expect_usage_error({"run", "--nnodes=2", "--rdzv-endpoint=a:", "--dry-run", "true"},
                     "give HOST or HOST:PORT");
  expect_usage_error({"run", "--nnodes=2", "--rdzv-endpoint=a:0", "--dry-run", "true"},
                     "give HOST or HOST:PORT");
  EXPECT_THAT(Job({"run", "--nnodes=2", "--rdzv-endpoint=a", "--dry-run", "true"}).wait().out,
              StartsWith("one of 2 hosts, whose launchers meet at a:29400; on this one:\n"));
  EXPECT_THAT(Job({"run", "--nnodes=2:4", "--master-addr=b", "--dry-run", "true"}).wait().out,
              StartsWith("one of 2 to 4 hosts, whose launchers meet at b:29500; on this one:\n"));
  EXPECT_THAT(Job({"run", "--nnodes=2", "--node-rank=0", "--master-addr=::1", "--dry-run", "true"})
                  .wait()
                  .out,
              HasSubstr("meet at [::1]:29500"));
}

}  // namespace
}  // namespace lockstep::launch::testing
