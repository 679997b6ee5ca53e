// `lockstep train` and `lockstep sweep`: what they start. A script stands for the program
// lockstep-trainer, which they execute beside themselves.
#include <fmt/format.h>
#include <gmock/gmock.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <string>

#include "support/folder.h"
#include "support/tool.h"

namespace lockstep::train {
namespace {

namespace fs = std::filesystem;
using nlohmann::json;
using test::Outcome;
using testing::HasSubstr;
using testing::Not;

class Ranks : public testing::Test {
 protected:
  Ranks() { fs::copy_file(fs::path(LOCKSTEP_BINARY_DIR) / "bin/lockstep", folder_ / "lockstep"); }

  void write(const std::string& name, const std::string& text) const {
    std::ofstream(folder_ / name) << text;
  }
  void trainer(const std::string& script) {
    write("lockstep-trainer", "#!/bin/sh\n" + script);
    fs::permissions(folder_ / "lockstep-trainer", fs::perms::owner_all);
  }
  // In a shell's words, in the test's folder.
  Outcome run(const std::string& args, const std::string& environment = "") const {
    return shell(fmt::format("env -u OMP_NUM_THREADS {} ./lockstep {}", environment, args));
  }
  Outcome bash(const std::string& command) const {
    write("command.sh", command + "\n");
    return shell("bash command.sh");
  }
  Outcome shell(const std::string& words) const {
    return test::shell(fmt::format("cd {} && {}", folder_.path(), words));
  }

  const test::Folder folder_{test::Folder::On::Disk};
};

int times(const std::string& part, const std::string& text) {
  int count = 0;
  for (size_t at = text.find(part); at != text.npos; at = text.find(part, at + 1)) ++count;
  return count;
}

constexpr const char* kSay = "echo \"rank $RANK of $WORLD_SIZE threads $OMP_NUM_THREADS: $*\"\n";

TEST_F(Ranks, AreStartedWithTheFileAndWhatWasSet) {
  trainer(kSay);
  write("run.yaml", "seed: 1\n");
  const auto result =
      run("train run.yaml --nproc-per-node 2 --set training.seed=3 --set 'model.hidden=[8, 8]'");
  EXPECT_EQ(result.status, 0) << result.said;
  for (const char* rank : {"rank 0", "rank 1"}) {
    EXPECT_THAT(result.said, HasSubstr(rank));
  }
  EXPECT_THAT(result.said, HasSubstr("of 2"));
  EXPECT_THAT(result.said,
              HasSubstr(": run.yaml --set training.seed=3 --set model.hidden=[8, 8]\n"));
}

TEST_F(Ranks, AreAsManyAsTheSectionLaunchSaysUnlessTheCommandLineDoes) {
  trainer(kSay);
  write("run.yaml", "launch: {nproc_per_node: 3, threads_per_rank: 2}\n");
  EXPECT_THAT(run("train run.yaml").said, HasSubstr("rank 2 of 3 threads 2"));
  EXPECT_THAT(run("train run.yaml --nproc-per-node=1").said, HasSubstr("rank 0 of 1 threads 2"));
  EXPECT_THAT(run("train run.yaml", "PET_NPROC_PER_NODE=2").said, HasSubstr("rank 1 of 2"));
  EXPECT_THAT(run("train run.yaml --set launch.nproc_per_node=1").said, HasSubstr("rank 0 of 1"));
}

// The command line goes before the environment, and --set is part of it.
TEST_F(Ranks, AreAsManyAsSetSaysWhateverTheEnvironmentDoes) {
  trainer(kSay);
  write("run.yaml", "launch: {nproc_per_node: 3}\n");
  write("acc.yaml", "num_processes: 2\ndistributed_type: MULTI_CPU\n");
  const std::string one = "train run.yaml --set launch.nproc_per_node=1 ";
  EXPECT_THAT(run(one, "PET_NPROC_PER_NODE=2").said, HasSubstr("rank 0 of 1"));
  EXPECT_THAT(run(one + "--config_file acc.yaml").said, HasSubstr("rank 0 of 1"));
  EXPECT_THAT(run(one + "--num_processes 2").said, HasSubstr("rank 1 of 2"));
  EXPECT_THAT(run(one + "--nproc-per-node 2", "PET_NPROC_PER_NODE=3").said,
              HasSubstr("rank 1 of 2"));
  EXPECT_THAT(run("train run.yaml --config_file acc.yaml").said, HasSubstr("rank 1 of 2"));
  trainer("echo \"again $TORCHELASTIC_MAX_RESTARTS.\"\n");
  EXPECT_THAT(run(one + "--set launch.max_restarts=0", "PET_MAX_RESTARTS=3").said,
              HasSubstr("again 0."));
  trainer("echo \"cores $(grep Cpus_allowed_list /proc/self/status | cut -f2).\"\n");
  const std::string all = run("train run.yaml --nproc-per-node 1").said;
  EXPECT_EQ(run(one + "--set launch.bind=none", "PET_BIND=cores").said, all);
  EXPECT_EQ(run(one + "--set launch.bind=none", "PET_NUMA_BINDING=node").said, all);
}

TEST_F(Ranks, HaveTheThreadsThatSetSaysOrAreRefused) {
  trainer(kSay);
  write("run.yaml", "launch: {threads_per_rank: 2}\n");
  const auto other = run("train run.yaml", "OMP_NUM_THREADS=1");
  EXPECT_THAT(other.said, HasSubstr("threads 1"));
  EXPECT_THAT(other.said, HasSubstr("run.yaml:1:10: launch.threads_per_rank 2 is not used: the "
                                    "environment has OMP_NUM_THREADS=1"));
  const std::string three = "train run.yaml --set launch.threads_per_rank=3";
  EXPECT_THAT(run(three).said, HasSubstr("threads 3"));
  EXPECT_THAT(run(three, "OMP_NUM_THREADS=3").said, HasSubstr("threads 3"));
  const auto refused = run(three, "OMP_NUM_THREADS=1");
  EXPECT_EQ(refused.status, 2);
  EXPECT_THAT(refused.said, HasSubstr("--set launch.threads_per_rank=3: contradicts the "
                                      "environment OMP_NUM_THREADS=1: unset the variable"));
  const std::string sweep = "sweep run.yaml --over training.seed=1";
  run(sweep);
  EXPECT_THAT(test::contents(folder_ / "sweep/run-000/log.txt"), HasSubstr("threads 2"));
  run("sweep run.yaml --over launch.threads_per_rank=0,3 --out chosen --jobs 64");
  EXPECT_THAT(test::contents(folder_ / "chosen/run-000/log.txt"), HasSubstr("threads 1"));
  EXPECT_THAT(test::contents(folder_ / "chosen/run-001/log.txt"), HasSubstr("threads 3"));
  const auto none =
      run("sweep run.yaml --over launch.threads_per_rank=3 --out none", "OMP_NUM_THREADS=1");
  EXPECT_EQ(none.status, 2);
  EXPECT_FALSE(fs::exists(folder_ / "none"));
}

// As lockstep-trainer reads it.
constexpr const char* kSayFile = "echo \"rank $RANK has $(cat $LOCKSTEP_CONFIG)\"\n";

// Each rank would read the pipe again, and find nothing.
TEST_F(Ranks, GetWhatTheLauncherHasReadOfAPipe) {
  trainer(kSayFile);
  for (const std::string start : {"train /dev/stdin --nproc-per-node 2", "train <(cat)"}) {
    const auto result = bash("echo 'seed: 7' | ./lockstep " + start);
    EXPECT_EQ(result.status, 0) << result.said;
    EXPECT_THAT(result.said, HasSubstr("rank 0 has "));
    EXPECT_THAT(result.said, HasSubstr("8:seed: 7\n"));
  }
  const auto swept = bash("echo 'seed: 7' | ./lockstep sweep /dev/stdin --over training.epochs=1");
  EXPECT_THAT(swept.said, HasSubstr("1 of 1 runs succeeded"));
  EXPECT_THAT(test::contents(folder_ / "sweep/run-000/log.txt"), HasSubstr("8:seed: 7\n"));
  const auto inside = bash("echo 'seed: 7' | RANK=0 WORLD_SIZE=1 ./lockstep train /dev/stdin");
  EXPECT_THAT(inside.said, HasSubstr("8:seed: 7\n"));
  for (const std::string command : {"train", "sweep --over training.epochs=1"}) {
    const auto empty = bash("./lockstep " + command + " /dev/stdin </dev/null");
    EXPECT_EQ(empty.status, 2) << empty.said;
    EXPECT_THAT(empty.said, HasSubstr("/dev/stdin:1:1: there is nothing in it"));
  }
}

// Not an edit, nor half of one, that was made since.
TEST_F(Ranks, ThatStartAgainGetTheSameFile) {
  trainer(fmt::format("{}echo 'seed: 8' > run.yaml\ntest $TORCHELASTIC_RESTART_COUNT -gt 0\n",
                      kSayFile));
  write("run.yaml", "seed: 7\n");
  const auto result = run("train run.yaml --max-restarts 1");
  EXPECT_EQ(result.status, 0) << result.said;
  EXPECT_EQ(times("8:seed: 7\n", result.said), 2) << result.said;
  EXPECT_THAT(result.said, Not(HasSubstr("seed: 8")));
}

TEST_F(Ranks, KnowWhatTheCommandLineSaysOfTheirStart) {
  trainer(kSayFile);
  write("run.yaml", "launch: {nproc_per_node: 3}\n");
  const auto result = run("train run.yaml --nproc-per-node 2", "PET_MAX_RESTARTS=1");
  EXPECT_THAT(result.said, HasSubstr("21:launch.nproc_per_node1:221:flag --nproc-per-node"));
  EXPECT_THAT(result.said, HasSubstr("19:launch.max_restarts1:130:environment PET_MAX_RESTARTS=1"));
  EXPECT_THAT(run("train run.yaml", "PET_N_PROC_PER_NODE=2").said,
              HasSubstr("environment PET_N_PROC_PER_NODE=2"));
  const auto plain = run("train run.yaml");
  EXPECT_THAT(plain.said, Not(HasSubstr("flag")));
}

TEST_F(Ranks, EncryptWhereTheFileSaysSo) {
  trainer("echo \"tls $LOCKSTEP_TLS.\"\n");
  write("run.yaml", "parallel: {tls: true}\n");
  EXPECT_THAT(run("train run.yaml --nproc-per-node 2").said, HasSubstr("tls 1."));
  EXPECT_THAT(run("train run.yaml", "LOCKSTEP_TLS=0").said, HasSubstr("tls 0."));
}

TEST_F(Ranks, KeepTheirExitStatus) {
  trainer("exit 7");
  write("run.yaml", "{}\n");
  EXPECT_EQ(run("train run.yaml --nproc-per-node 2").status, 7);
}

TEST_F(Ranks, ArePlacedByALauncherThatIsThere) {
  trainer(kSay);
  write("run.yaml", "launch: {nproc_per_node: 3}\n");
  const auto rank = run("train run.yaml --set seed=2", "RANK=1 WORLD_SIZE=4");
  EXPECT_EQ(rank.said, "rank 1 of 4 threads : run.yaml --set seed=2\n");
  const auto refused = run("train run.yaml --nproc-per-node 2", "RANK=1 WORLD_SIZE=4");
  EXPECT_EQ(refused.status, 2);
  EXPECT_THAT(refused.said, HasSubstr("RANK and WORLD_SIZE are set, so this process is a rank"));
  EXPECT_THAT(refused.said, HasSubstr("leave out --nproc-per-node"));
  const auto inside = run("run --nproc-per-node 2 ./lockstep train run.yaml");
  EXPECT_THAT(inside.said, HasSubstr("rank 1 of 2"));
  EXPECT_THAT(inside.said, Not(HasSubstr("of 3")));
  const auto slurm =
      run("train run.yaml",
          "SLURM_STEP_ID=0 SLURM_PROCID=1 SLURM_STEP_NUM_TASKS=2 SLURM_STEP_TASKS_PER_NODE=2");
  EXPECT_EQ(slurm.said, "rank  of  threads : run.yaml\n");
}

TEST_F(Ranks, TakeMixedPrecisionFromAcceleratesFile) {
  trainer("echo \"precision $ACCELERATE_MIXED_PRECISION\"\n");
  write("acc.yaml", "num_processes: 2\ndistributed_type: MULTI_CPU\nmixed_precision: bf16\n");
  write("run.yaml", "{}\n");
  EXPECT_THAT(run("train run.yaml --config_file acc.yaml").said,
              HasSubstr("[rank 1] precision bf16"));
  write("fsdp.yaml",
        "num_processes: 2\ndistributed_type: FSDP\nfsdp_config: {fsdp_sharding_strategy: 1}\n");
  trainer("echo \"fsdp $ACCELERATE_USE_FSDP $FSDP_SHARDING_STRATEGY\"\n");
  EXPECT_THAT(run("train run.yaml --config_file fsdp.yaml").said,
              HasSubstr("[rank 1] fsdp true FULL_SHARD"));
  write("run.yaml", "parallel: {zero: true}\n");
  const auto refused = run("train run.yaml --config_file fsdp.yaml");
  EXPECT_EQ(refused.status, 2);
  EXPECT_THAT(refused.said, HasSubstr("parallel.zero: needs parallel.strategy: ddp"));
}

// Which variable says nothing of it, as accelerate sets that one in any case.
TEST_F(Ranks, KnowThatMixedPrecisionIsNotWanted) {
  trainer(kSayFile);
  write("run.yaml", "mixed_precision: bf16\n");
  EXPECT_THAT(run("train run.yaml --mixed_precision no").said,
              HasSubstr("21:mixed_precision.dtype2:no22:flag --mixed-precision"));
  EXPECT_THAT(run("train run.yaml", "PET_MIXED_PRECISION=no").said,
              HasSubstr("2:no34:environment PET_MIXED_PRECISION=no"));
  EXPECT_THAT(run("train run.yaml").said, Not(HasSubstr("mixed_precision.dtype")));
  write("run.yaml", "mixed_precision: {dtype: fp16, initial_scale: 8}\n");
  EXPECT_THAT(run("train run.yaml --mixed_precision no").said,
              HasSubstr("initial_scale: needs mixed_precision.dtype: fp16"));
}

TEST_F(Ranks, WrongWords) {
  trainer(kSay);
  write("run.yaml", "{}\n");
  EXPECT_THAT(run("train").said, HasSubstr("no file given"));
  EXPECT_THAT(run("train run.yaml other.yaml").said, HasSubstr("two files"));
  EXPECT_THAT(run("train run.yaml --nproc 2").said, HasSubstr("the nearest is --nproc"));
  fs::remove(folder_ / "lockstep-trainer");
  const auto missing = run("train run.yaml");
  EXPECT_EQ(missing.status, 127);
  EXPECT_THAT(missing.said, HasSubstr("lockstep-trainer cannot be executed: No such file"));
}

// Writes the loss that belongs to its seed.
constexpr const char* kResult = R"(
for word; do case $word in
  logging.output_dir=*) out=$(echo "${word#*=}" | tr -d '"');;
  training.seed=*) seed=${word#*=};;
esac; done
test $seed = 9 && exit 3
echo "training"
echo "{\"metrics\": {\"loss\": 0.$((7 - seed))}}" > $out/result.json
)";

TEST_F(Ranks, OfASweepAreThoseOfEachCombination) {
  trainer(kResult);
  write("run.yaml", "epochs: 2\n");
  const auto swept =
      run("sweep run.yaml --over training.seed=1,2,3 --over 'model.hidden=[8],[8, 8]' --out s "
          "--jobs 2");
  EXPECT_EQ(swept.status, 0) << swept.said;
  EXPECT_THAT(swept.said, HasSubstr("6 runs, 2 at a time, in s\n"));
  EXPECT_THAT(swept.said, HasSubstr("best: run-004 (loss = 0.4) with training.seed=3 "
                                    "model.hidden=[8]\n"));
  std::ifstream file(folder_ / "s/sweep.json");
  const json all = json::parse(file);
  ASSERT_EQ(all["runs"].size(), 6U);
  EXPECT_EQ(all["best"], "run-004");
  EXPECT_EQ(all["runs"][1]["set"][1], "model.hidden=[8, 8]");
  EXPECT_EQ(all["runs"][1]["result"]["metrics"]["loss"], 0.6);
  std::ifstream log(folder_ / "s/run-000/log.txt");
  std::string line;
  std::getline(log, line);
  EXPECT_THAT(line, HasSubstr("training"));
  const auto again = run("sweep run.yaml --over training.seed=1 --out s");
  EXPECT_EQ(again.status, 2);
  EXPECT_THAT(again.said, HasSubstr("s/run-000 is there already"));
}

TEST_F(Ranks, OfASweepAreComparedByTheMeaningOfTheMetric) {
  trainer(R"(
for word; do case $word in
  logging.output_dir=*) out=$(echo "${word#*=}" | tr -d '"');;
  training.seed=*) seed=${word#*=};;
esac; done
echo "{\"metrics\": {\"mae\": $seed, \"r2\": $seed}}" > $out/result.json
)");
  write("run.yaml", "training: {metrics: [mae, r2]}\n");
  const std::string over = "sweep run.yaml --over training.seed=1,2 ";
  EXPECT_THAT(run(over + "--metric mae --out a").said, HasSubstr("best: run-000 (mae = 1)"));
  EXPECT_THAT(run(over + "--metric r2 --out b").said, HasSubstr("best: run-001 (r2 = 2)"));
  EXPECT_THAT(run(over + "--metric mae --mode max --out c").said, HasSubstr("best: run-001"));
}

// Whose last evaluation is not that of the model that is left.
TEST_F(Ranks, OfASweepThatRestoreTheirBestAreComparedByIt) {
  trainer(R"sh(
for word; do case $word in
  logging.output_dir=*) out=$(echo "${word#*=}" | tr -d '"');;
  training.seed=*) seed=${word#*=};;
esac; done
best="\"best_metric\": \"loss\", \"best_value\": 0.$((5 - seed))"
echo "{\"metrics\": {\"loss\": $seed, \"mae\": $seed}, $best}" > $out/result.json
)sh");
  write("run.yaml", "training: {metrics: [mae]}\ncheckpoint: {best_metric: loss}\n");
  const std::string over = "sweep run.yaml --over training.seed=1,2 ";
  const std::string restored = over + "--set checkpoint.restore_best=true ";
  EXPECT_THAT(run(over + "--out a").said, HasSubstr("best: run-000 (loss = 1)"));
  EXPECT_THAT(run(restored + "--out b").said, HasSubstr("best: run-001 (loss = 0.3)"));
  EXPECT_THAT(run(restored + "--metric mae --out c").said, HasSubstr("best: run-000 (mae = 1)"));
}

// A run would be called by a value that it was not trained with.
TEST_F(Ranks, OfASweepHaveOneValueOfAKey) {
  trainer(kResult);
  write("run.yaml", "epochs: 2\n");
  const auto refused = [&](const std::string& axes, const std::string& why) {
    const auto swept = run("sweep run.yaml " + axes);
    EXPECT_EQ(swept.status, 2) << axes;
    EXPECT_THAT(swept.said, HasSubstr(why));
    EXPECT_FALSE(fs::exists(folder_ / "sweep"));
  };
  refused("--over seed=1,2 --over training.seed=3,4",
          "[sweep] --over seed and --over training.seed: each says training.seed, and a run has "
          "one: give all its values in one");
  refused("--over 'training={seed: 1},{epochs: 2}' --over training.seed=5,6",
          "--over training and --over training.seed: each says training.seed");
  refused("--over launch.nproc_per_node=1,2 --nproc-per-node 2",
          "--over launch.nproc_per_node: --nproc-per-node gives all runs the same number of ranks");
  refused("--over optimizer.learning_rate=1e-3,0.001",
          "optimizer.learning_rate=0.001 is the same run as optimizer.learning_rate=1e-3");
  refused("--over output_dir=a,b", "--over output_dir: each run has a folder of its own");
  refused("--over 'logging={output_dir: a}'", "each run has a folder of its own");
  EXPECT_EQ(run("sweep run.yaml --over seed=1,2 --over epochs=1,2 --set training.seed=5").status,
            0);
}

// One run would go on with another's checkpoints.
TEST_F(Ranks, OfASweepShareNoFiles) {
  trainer(kResult);
  const std::string over = "sweep run.yaml --over training.seed=1,2";
  for (const std::string key :
       {"checkpoint.directory: all", "logging.metrics_file: all/metrics.jsonl",
        "logging.open_metrics_file: all", "logging.prometheus_address: '127.0.0.1:9464'",
        "logging.result_file: all", "launch.master_port: 29500"}) {
    const size_t dot = key.find('.');
    write("run.yaml", key.substr(0, dot) + ": {" + key.substr(dot + 1) + "}\n");
    const auto refused = run(over);
    EXPECT_EQ(refused.status, 2) << key;
    EXPECT_THAT(refused.said, HasSubstr("[sweep] " + key.substr(0, key.find(':')) + " is "));
    EXPECT_FALSE(fs::exists(folder_ / "sweep"));
  }
  write("run.yaml", "launch: {master_port: 29500}\n");
  EXPECT_EQ(run(over + " --set launch.master_port=0 --out free").status, 0);
  write("run.yaml", "logging: {prometheus_address: '127.0.0.1:0'}\n");
  EXPECT_EQ(run(over + " --over checkpoint.directory=a").status, 2);
  EXPECT_EQ(run("sweep run.yaml --over checkpoint.directory=a,b --set training.seed=1").status, 0);
}

TEST_F(Ranks, OfASweepThatFailAreNamed) {
  trainer(kResult);
  write("run.yaml", "epochs: 2\n");
  const auto swept = run("sweep run.yaml --over training.seed=9,2");
  EXPECT_EQ(swept.status, 1);
  EXPECT_THAT(swept.said, HasSubstr("run-000: training.seed=9: failed with status 3: "
                                    "sweep/run-000/log.txt\n"));
  EXPECT_THAT(swept.said, HasSubstr("1 of 2 runs succeeded; sweep/sweep.json"));
  const auto wrong = run("sweep run.yaml --over training.sed=9,2 --out other");
  EXPECT_EQ(wrong.status, 2);
  EXPECT_THAT(wrong.said, HasSubstr("--set training.sed=9: unknown key 'sed'"));
  EXPECT_FALSE(fs::exists(folder_ / "other"));
  EXPECT_THAT(run("sweep run.yaml --over training.seed=").said, HasSubstr("no values"));
  EXPECT_THAT(run("sweep run.yaml --over seed").said, HasSubstr("expected KEY=V,V"));
}

// As under a parent that wants to hear nothing of its children; the kernel then forgets theirs,
// too.
TEST_F(Ranks, OfASweepEndThoughSigchldWasIgnored) {
  trainer(kResult);
  write("run.yaml", "epochs: 2\n");
  const auto swept = run("sweep run.yaml --over training.seed=1,2", "--ignore-signal=CHLD");
  EXPECT_EQ(swept.status, 0) << swept.said;
  EXPECT_THAT(swept.said, HasSubstr("2 of 2 runs succeeded"));
}

TEST_F(Ranks, AFileMayNameAProgramOfItsOwn) {
  write("three_domain", "#!/bin/sh\necho rank $RANK of $WORLD_SIZE: $*\n");
  fs::permissions(folder_ / "three_domain", fs::perms::owner_all);
  write("run.yaml", "program: three_domain\nnum_gpus: 3\nbeta: 0.2\n");
  auto done = run("train run.yaml --set learning_rate=1e-5");
  EXPECT_EQ(done.status, 0) << done.said;
  EXPECT_THAT(done.said, HasSubstr("rank 2 of 3: --config run.yaml --learning-rate=1e-5"));
  done = run("train run.yaml --nproc-per-node 1");
  EXPECT_THAT(done.said, HasSubstr("rank 0 of 1: --config run.yaml"));
  done = run("train run.yaml --set num_gpus=4");
  EXPECT_THAT(done.said, HasSubstr("rank 3 of 4: --config run.yaml"));
  done = run("train run.yaml", "RANK=1 WORLD_SIZE=2");
  EXPECT_THAT(done.said, HasSubstr("rank 1 of 2: --config run.yaml"));
  write("run.yaml", "\nprogram: four_domain\n");
  done = run("train run.yaml");
  EXPECT_EQ(done.status, 2);
  EXPECT_THAT(done.said, HasSubstr("run.yaml:2: program four_domain; there is three_domain"));
  // A section of that name says it, too, and may have others beside it.
  write("run.yaml",
        "three_domain:\n  num_gpus: 3\nlogging: {output_dir: x}\nlaunch:\n  max_restarts: 1\n");
  done = run("train run.yaml --set three_domain.beta=0.05 --set launch.max_restarts=0");
  EXPECT_EQ(done.status, 0) << done.said;
  EXPECT_THAT(done.said, HasSubstr("rank 2 of 3: --config run.yaml --three-domain.beta=0.05\n"));
  done = run("train run.yaml --set three_domain.num_gpus=2");
  EXPECT_THAT(done.said, HasSubstr("rank 1 of 2: --config run.yaml"));
  write("run.yaml", "three_domain: {beta: 0.05}\nlaunch:\n  nproc_per_node: 4\n");
  EXPECT_THAT(run("train run.yaml").said, HasSubstr("rank 3 of 4: --config run.yaml"));
  write("run.yaml", "three_domain:\n  beta: 0.05\nlaunch:\n  nproc_per_nod: 4\n");
  done = run("train run.yaml");
  EXPECT_EQ(done.status, 2) << done.said;
  EXPECT_THAT(done.said, HasSubstr("run.yaml:4:3: unknown key 'nproc_per_nod'"));
  // What is anchored in one section may be used in the other.
  write("run.yaml", "three_domain:\n  num_gpus: &ranks 3\nlaunch:\n  nproc_per_node: *ranks\n");
  EXPECT_THAT(run("train run.yaml").said, HasSubstr("rank 2 of 3: --config run.yaml"));
  write("run.yaml", "three_domain: {beta: &x 0.5}\n\nlaunch:\n  # here\n  nproc_per_node: *x\n");
  EXPECT_THAT(run("train run.yaml").said, HasSubstr("run.yaml:5:3: launch.nproc_per_node: '0.5'"));
  write("run.yaml", "{three_domain: {beta: 0.05}, launch: {nproc_per_node: 2}}\n");
  EXPECT_THAT(run("train run.yaml").said, HasSubstr("rank 1 of 2: --config run.yaml"));
  EXPECT_THAT(run("config check run.yaml").said,
              HasSubstr("run.yaml:1:16: a file with 'three_domain' is that program's"));
}

}  // namespace
}  // namespace lockstep::train
