// `lockstep config` and the page that it writes.
#include <fmt/format.h>
#include <gmock/gmock.h>
#include <unistd.h>

#include <filesystem>
#include <string>

#include "lockstep/train/config.h"
#include "support/folder.h"
#include "support/tool.h"

namespace lockstep::train {
namespace {

namespace fs = std::filesystem;
using test::lockstep_tool;
using testing::HasSubstr;
using testing::StartsWith;

class ConfigCommands : public testing::Test {
 protected:
  std::string write(const std::string& name, const std::string& text) {
    test::write(folder_ / name, text);
    return folder_ / name;
  }

  const test::Folder folder_;
};

TEST_F(ConfigCommands, TheReferencePageIsTheCodes) {
  EXPECT_EQ(test::contents(LOCKSTEP_SOURCE_DIR "/docs/configuration.md"), config_reference())
      << "write it again: build/release/bin/lockstep config reference > docs/configuration.md";
}

TEST_F(ConfigCommands, TheFileToStartFromIsCorrect) {
  EXPECT_EQ(parse_config(starter_config(), "run.yaml").model.kind, "mlp");
  const std::string file = folder_ / "run.yaml";
  EXPECT_EQ(lockstep_tool("config init " + file + " </dev/null").status, 0);
  EXPECT_EQ(test::contents(file), starter_config());
  const auto checked = lockstep_tool("config check " + file);
  EXPECT_EQ(checked.status, 0);
  EXPECT_EQ(checked.said, file + ": correct\n");
}

TEST_F(ConfigCommands, InitReplacesNothingUnlessTold) {
  const std::string file = write("run.yaml", "mine");
  const auto refused = lockstep_tool("config init " + file);
  EXPECT_EQ(refused.status, 2);
  EXPECT_THAT(refused.said, HasSubstr("is there already; --force replaces it"));
  EXPECT_EQ(test::contents(file), "mine");
  EXPECT_EQ(lockstep_tool("config init --force " + file).status, 0);
  EXPECT_EQ(test::contents(file), starter_config());
  EXPECT_EQ(lockstep_tool("config init -").said, starter_config());
  EXPECT_EQ(lockstep_tool("config init /none/run.yaml").status, 1);
  EXPECT_THAT(lockstep_tool("config init --force " + folder_.path()).said,
              HasSubstr("a folder: name a file in it"));
}

TEST_F(ConfigCommands, ANameThatCannotBeLookedAtIsNamed) {
  const std::string loop = folder_ / "loop";
  fs::create_symlink("loop", loop);
  const std::string long_name = folder_ / std::string(300, 'a');
  for (const std::string& name : {loop, long_name}) {
    const char* why = name == loop ? "Too many levels of symbolic links" : "File name too long";
    EXPECT_THAT(lockstep_tool("tokenize " + name + " --to " + (folder_ / "corpus")).said,
                HasSubstr(fmt::format("[text] {}: cannot be opened: {}", name, why)));
  }
  EXPECT_THAT(lockstep_tool("config init --force " + long_name).said,
              HasSubstr(fmt::format("[config] init: {}: File name too long", long_name)));
  EXPECT_EQ(lockstep_tool("config init --force " + loop).status, 0);  // the link is replaced
  EXPECT_EQ(test::contents(loop), starter_config());
}

// Beyond the limit of a file's size, as on a full disk. Not under ThreadSanitizer, whose runtime
// writes a file of its own first.
TEST_F(ConfigCommands, AFileThatCannotBeReplacedStays) {
  const std::string file = write("run.yaml", "mine");
  const auto run = [&](const std::string& words) {
    return test::shell("ulimit -f 0; " LOCKSTEP_BINARY_DIR "/bin/lockstep " + words);
  };
  const auto failed = run("config init --force " + file);
  EXPECT_EQ(failed.status, 1);
  EXPECT_THAT(failed.said, HasSubstr("[config] init: " + file + ": File too large"));
  EXPECT_EQ(test::contents(file), "mine");
  const std::string config = write("model.yaml", "{}\n");
  const std::string trace = write("trace.json", "mine");
  const auto simulated = run("simulate " + config + " --ranks 2 --trace " + trace);
  EXPECT_EQ(simulated.status, 1);
  EXPECT_THAT(simulated.said, HasSubstr("[simulate] cannot write " + trace + ": File too large"));
  EXPECT_EQ(test::contents(trace), "mine");
}

TEST_F(ConfigCommands, ShowHasEachValueAndItsPlace) {
  const std::string file = write("run.yaml", "seed: 3\n");
  const auto shown = lockstep_tool("config show " + file + " --set training.epochs=4");
  EXPECT_EQ(shown.status, 0);
  EXPECT_THAT(shown.said, HasSubstr("  seed: 3" + std::string(37, ' ') + "# " + file + ":1:1\n"));
  EXPECT_THAT(shown.said, HasSubstr("# --set training.epochs=4\n"));
  EXPECT_THAT(shown.said, HasSubstr("  batch_size: 64                              # default\n"));
}

TEST_F(ConfigCommands, CheckTellsEverythingOfAllFiles) {
  const std::string good = write("good.yaml", "{}\n");
  const std::string bad = write("bad.yaml", "sed: 3\ntraining: {epochs: 0}\n");
  const auto checked = lockstep_tool(fmt::format("config check {} {} /none.yaml", good, bad));
  EXPECT_EQ(checked.status, 2);
  EXPECT_THAT(checked.said, HasSubstr(good + ": correct\n"));
  EXPECT_THAT(checked.said, HasSubstr(bad + ":1:1: unknown key 'sed'; the nearest is seed"));
  EXPECT_THAT(checked.said, HasSubstr(bad + ":2:20: epochs: '0' is not a whole number, 1 or more"));
  EXPECT_THAT(checked.said, HasSubstr("/none.yaml: No such file"));
}

TEST_F(ConfigCommands, WrongWordsAreNamed) {
  EXPECT_THAT(lockstep_tool("config shw x").said, HasSubstr("'shw'; the nearest is show"));
  EXPECT_THAT(lockstep_tool("config").said, HasSubstr("say what to do"));
  EXPECT_THAT(lockstep_tool("config --help").said, HasSubstr("check"));
  EXPECT_THAT(lockstep_tool("confg").said, HasSubstr("the nearest is config"));
  EXPECT_THAT(lockstep_tool("config xyz").said, HasSubstr("'xyz' (lockstep config --help)"));
  EXPECT_THAT(lockstep_tool("xyz").said, HasSubstr("'xyz'; to start a program, write: lockstep"));
}

TEST_F(ConfigCommands, AKeyAsAFlagOfTrainIsToldHowToBeSet) {
  const std::string file = write("run.yaml", "{}\n");
  const auto said = [&](const std::string& flags) {
    const auto out = lockstep_tool("train " + file + " " + flags);
    EXPECT_EQ(out.status, 2);
    return out.said;
  };
  const auto set = [](const std::string& flag, const std::string& override) {
    return StartsWith("lockstep: [train] unknown flag " + flag + ": write --set " + override +
                      " (lockstep train --help)");
  };
  EXPECT_THAT(said("--epochs 3"), set("--epochs", "training.epochs=3"));
  EXPECT_THAT(said("--batch-size=8"), set("--batch-size", "training.batch_size=8"));
  EXPECT_THAT(said("--lr 0.1"), set("--lr", "optimizer.learning_rate=0.1"));
  EXPECT_THAT(said("--lr"), set("--lr", "optimizer.learning_rate=VALUE"));
  EXPECT_THAT(said("--fp16"), set("--fp16", "mixed_precision.dtype=fp16"));
  EXPECT_THAT(said("--zero --tls"), set("--zero", "parallel.zero=true"));
  EXPECT_THAT(said("--training.epochs 3"), set("--training.epochs", "training.epochs=3"));
  EXPECT_THAT(said("--foo 3"), StartsWith("lockstep: [train] unknown flag --foo (lockstep train"));
  EXPECT_THAT(said("--nprocs 3"), HasSubstr("[train] unknown flag --nprocs; the nearest is "
                                            "--nproc-per-node (lockstep train --help)"));
  EXPECT_THAT(said("-x A=1"), HasSubstr("[train] -x: ranks get the launcher's environment: write "
                                        "NAME=VALUE before lockstep train"));
  EXPECT_THAT(lockstep_tool("run --lr 3 true").said,
              HasSubstr("[run] unknown flag --lr (lockstep"));
}

TEST_F(ConfigCommands, AWrongFileStartsNoRank) {
  const std::string bad = write("bad.yaml", "sed: 3\nepochs: x\n");
  const auto refused = lockstep_tool("train " + bad + " --nproc-per-node 2");
  EXPECT_EQ(refused.status, 2);
  EXPECT_THAT(refused.said, StartsWith("lockstep: [config] " + bad + ": 2 errors\n"));
  EXPECT_EQ(refused.said.find("sed"), refused.said.rfind("'sed'") + 1);
}

}  // namespace
}  // namespace lockstep::train
