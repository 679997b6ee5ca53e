// `lockstep inspect`, `verify`, `merge`, `export` and `diff`, as programs.
#include "support/tool.h"

#include <gmock/gmock.h>
#include <sys/stat.h>

#include <filesystem>
#include <limits>
#include <nlohmann/json.hpp>

#include "checkpoint_format/small_checkpoint.h"
#include "support/folder.h"

namespace lockstep::test {
namespace {

using checkpoint::Safetensors;
using testing::AllOf;
using testing::HasSubstr;
using testing::Not;
using testing::StartsWith;

class Tool : public testing::Test {
 protected:
  Tool() {
    checkpoint::Directory directory(runs_);
    one_ = save(directory, 1, 1.5);
    two_ = save(directory, 2, 2.5);
  }
  // Expects `lockstep ARGS` to end with `status`, and returns what it said.
  static std::string run(int status, const std::string& args) {
    const Outcome outcome = lockstep_tool(args);
    EXPECT_EQ(outcome.status, status) << args << "\n" << outcome.said;
    return outcome.said;
  }
  static void flip_last_bit(const std::string& path) {
    std::string bytes = contents(path);
    bytes.back() = static_cast<char>(bytes.back() ^ 1);
    write(path, bytes);
  }
  std::string out(const std::string& name) const { return folder_ / name; }

  const Folder folder_;
  const std::string runs_ = folder_ / "runs";
  std::string one_, two_;
};

TEST_F(Tool, InspectShowsTensorsValuesAndFiles) {
  const std::string said = run(0, "inspect " + one_);
  EXPECT_THAT(said, AllOf(StartsWith(one_ + ": checkpoint of step 1, save 1, by 2 ranks, 2 files"),
                          HasSubstr("weight  F32 [4, 3]       48 B  shard-0-of-2.safetensors, "
                                    "shard-1-of-2.safetensors\n"),
                          HasSubstr("bias    F32 [3]          12 B  shard-0-of-2.safetensors\n"),
                          HasSubstr("2 tensors, 60 B"), HasSubstr("  lr  0.1\n")));
  EXPECT_EQ(said, run(0, "inspect " + one_ + "/"));
  EXPECT_EQ(said, run(0, "inspect " + one_ + "/manifest.json"));
}

TEST_F(Tool, InspectTakesTheNewestOfADirectory) {
  EXPECT_THAT(run(0, "inspect " + runs_),
              AllOf(StartsWith(two_), HasSubstr("step-00000001  step 1\n"),
                    HasSubstr("step-00000002  step 2  (the newest, shown above)")));
}

// The folder of a run of `lockstep train`, with its checkpoints in `checkpoints`.
TEST_F(Tool, ARunsFolderIsTakenForItsCheckpoints) {
  const std::string run_folder = out("run");
  std::filesystem::create_directories(run_folder);
  EXPECT_THAT(run(1, "inspect " + run_folder), HasSubstr("nor a run's folder checkpoints"));
  std::filesystem::rename(runs_, run_folder + "/checkpoints");
  write(run_folder + "/metrics.jsonl", "");
  EXPECT_THAT(run(0, "inspect " + run_folder),
              AllOf(HasSubstr("checkpoints/step-00000002: checkpoint"),
                    HasSubstr("step-00000001  step 1\n")));
  EXPECT_THAT(run(0, "verify " + run_folder + "/"), HasSubstr("/checkpoints/latest: whole"));
  run(0, "export " + run_folder + " --to " + out("x.safetensors"));
  EXPECT_THAT(run(0, "diff " + run_folder + " " + out("x.safetensors")),
              HasSubstr("0 differences"));
  // A model beside it takes precedence.
  std::filesystem::rename(out("x.safetensors"), run_folder + "/model.safetensors");
  EXPECT_THAT(run(0, "inspect " + run_folder), HasSubstr("safetensors file"));
  EXPECT_THAT(run(0, "verify " + run_folder), Not(HasSubstr("latest")));
}

// Whose model is the best one's, and of which no other file may have it.
TEST_F(Tool, ExportTakesTheBestOfARunThatRestoresIt) {
  const std::string run_folder = out("run");
  std::filesystem::create_directories(run_folder);
  std::filesystem::rename(runs_, run_folder + "/checkpoints");
  const std::string command = "export --force " + run_folder + " --to " + out("x.safetensors");
  write(run_folder + "/result.json", R"({"best_checkpoint": "gone/checkpoints/step-00000001"})");
  write(run_folder + "/config.yaml", "checkpoint:\n  restore_best: false\n");
  EXPECT_THAT(run(0, command), HasSubstr("run/checkpoints/step-00000002\n"));
  write(run_folder + "/config.yaml", "checkpoint:\n  restore_best: true  # run.yaml:3:5\n");
  EXPECT_THAT(run(0, command), HasSubstr("run/checkpoints/step-00000001, the best one, as "
                                         "checkpoint.restore_best has it\n"));
  EXPECT_THAT(run(0, "diff " + run_folder + "/checkpoints/step-00000001 " + out("x.safetensors")),
              HasSubstr("0 differences"));
  write(run_folder + "/result.json", R"({"best_checkpoint": null})");
  EXPECT_THAT(run(0, command), HasSubstr("run/checkpoints/step-00000002\n"));
}

TEST_F(Tool, NamesThatAreNotThereAreAnsweredByThoseThatAre) {
  EXPECT_THAT(run(1, "export " + one_ + " --only net --to " + out("x.safetensors")),
              HasSubstr("no tensor is called 'net', or is below it; there are 'bias', 'weight'"));
}

TEST_F(Tool, InspectAsJson) {
  const auto json = nlohmann::json::parse(run(0, "inspect --json " + one_));
  EXPECT_EQ(json["kind"], "checkpoint");
  EXPECT_EQ(json["step"], 1);
  EXPECT_EQ(json["world"], 2);
  EXPECT_EQ(json["values"]["lr"], 0.1);
  EXPECT_EQ(json["tensors"].size(), 2u);
  const auto& weight = json["tensors"]["weight"];
  EXPECT_EQ(weight["dtype"], "F32");
  EXPECT_EQ(weight["shape"], (std::vector<int>{4, 3}));
  EXPECT_EQ(weight["bytes"], 48);
  EXPECT_EQ(weight["parts"][1]["file"], "shard-1-of-2.safetensors");
  EXPECT_EQ(weight["parts"][1]["offset"], (std::vector<int>{2, 0}));
  EXPECT_EQ(json["files"].size(), 2u);
}

TEST_F(Tool, VerifyNamesEachDamagedFileAndTensor) {
  EXPECT_THAT(run(0, "verify " + runs_),
              AllOf(HasSubstr(one_ + ": whole"), HasSubstr("latest: whole")));
  flip_last_bit(one_ + "/shard-1-of-2.safetensors");
  std::filesystem::remove(two_ + "/shard-0-of-2.safetensors");
  const std::string said = run(1, "verify " + runs_);
  EXPECT_THAT(said, AllOf(HasSubstr(one_ + ": DAMAGED, 1 finding\n"),
                          HasSubstr("shard-1-of-2.safetensors: tensor 'weight' is damaged"),
                          HasSubstr("shard-0-of-2.safetensors: cannot be opened: No such file")));
  EXPECT_THAT(run(1, "verify " + one_), HasSubstr("tensor 'weight' is damaged"));
}

TEST_F(Tool, VerifyLooksAtLatest) {
  const std::string latest = runs_ + "/latest", whole = contents(latest);
  for (size_t bit = 0; bit < whole.size() * 8; bit += 7) {
    std::string flipped = whole;
    flipped[bit / 8] = static_cast<char>(flipped[bit / 8] ^ 1 << bit % 8);
    write(latest, flipped);
    EXPECT_THAT(run(1, "verify " + runs_), HasSubstr(latest + ": DAMAGED, 1 finding\n")) << bit;
  }
  write(latest, "step-\xff\xfe 1");
  EXPECT_THAT(run(1, "verify " + runs_),
              AllOf(HasSubstr("step-\\xff\\xfe"), Not(HasSubstr("\xff"))));
  write(latest, "");
  EXPECT_THAT(run(1, "verify " + runs_), HasSubstr("latest: is damaged"));
  std::filesystem::remove(latest);
  EXPECT_THAT(run(1, "verify " + runs_), HasSubstr("latest: cannot be opened: No such file"));
  EXPECT_THAT(run(0, "verify " + one_), HasSubstr(": whole"));
}

TEST_F(Tool, ADamagedManifestIsNamedByEveryCommand) {
  write(two_ + "/manifest.json", "{}");
  const std::string what = "step-00000002/manifest.json: is damaged";
  EXPECT_THAT(run(1, "inspect " + two_), HasSubstr(what));
  EXPECT_THAT(run(1, "inspect " + runs_), AllOf(HasSubstr(what), HasSubstr("is step-00000001")));
  EXPECT_THAT(run(1, "verify " + runs_), HasSubstr(what));
  EXPECT_THAT(run(1, "merge " + two_ + " --to " + out("x")), HasSubstr(what));
  EXPECT_THAT(run(2, "diff " + one_ + " " + two_), HasSubstr(what));
}

TEST_F(Tool, HalfPublishedAndMissingOnesAreNamed) {
  checkpoint::Directory directory(folder_ / "other");
  const std::string begun = directory.begin(7);
  EXPECT_THAT(run(1, "inspect " + begun), HasSubstr("is a save that has not ended"));
  EXPECT_THAT(run(1, "inspect " + out("other")),
              HasSubstr("holds no published checkpoint, only what a save left that did not end: "
                        ".tmp-step-00000007"));
  EXPECT_THAT(run(1, "verify " + out("other")), HasSubstr("holds no published checkpoint"));
  EXPECT_THAT(run(1, "inspect " + out("nothing")),
              HasSubstr("nothing: cannot be opened: No such file"));
  EXPECT_THAT(run(2, "diff " + one_ + " " + out("nothing")),
              HasSubstr("nothing: cannot be opened"));
  std::filesystem::remove(one_ + "/manifest.json");
  EXPECT_THAT(run(1, "inspect " + one_), HasSubstr("neither manifest.json nor"));
  std::filesystem::create_directory(out("empty"));
  EXPECT_THAT(run(1, "inspect " + out("empty")), HasSubstr("holds no checkpoint"));
  write(out("empty") + "/.metadata", "");
  EXPECT_THAT(run(1, "inspect " + out("empty")), HasSubstr("distributed checkpoint (DCP)"));
  write(out("text"), "no tensors in here");
  EXPECT_THAT(run(1, "inspect " + out("text")), HasSubstr("is not a safetensors file"));
  // Without a writer, which opening would wait for.
  ASSERT_EQ(mkfifo(out("pipe").c_str(), 0600), 0);
  EXPECT_THAT(run(1, "inspect " + out("pipe")), HasSubstr("is not a regular file"));
}

TEST_F(Tool, WrongArgumentsAreStatusTwo) {
  EXPECT_THAT(run(2, "inspect"), HasSubstr("CHECKPOINT is required"));
  EXPECT_THAT(run(2, "inspect a b"), HasSubstr("b"));
  EXPECT_THAT(run(2, "merge " + one_), HasSubstr("--to is required"));
  EXPECT_THAT(run(1, "merge " + one_ + " --force --to " + runs_), HasSubstr("is a folder: name"));
  EXPECT_THAT(run(1, "export " + one_ + " --to /dev/null"),
              HasSubstr("/dev/null: is a device, pipe or socket, which is not replaced: name a "
                        "folder, or NAME.safetensors for a file"));
  std::ofstream(out("file")) << "mine";
  EXPECT_THAT(run(1, "export --force " + one_ + " --to " + out("file")),
              HasSubstr("/file: is a file: name a folder, or NAME.safetensors"));
  EXPECT_THAT(run(2, "diff " + one_), HasSubstr("B is required"));
  for (const std::string number : {"-1", "nan", "inf", "x"}) {
    EXPECT_THAT(run(2, "diff a b --atol " + number),
                HasSubstr("--atol: '" + number + "': give a number, 0 or more"));
  }
  EXPECT_THAT(run(2, "inspect a --episode 0"),
              HasSubstr("--episode: '0': give a whole number from 1"));
  EXPECT_THAT(run(2, "export a --to b.safetensors --max-shard-size 5GB"),
              HasSubstr("--max-shard-size is about the files of a folder"));
  for (const std::string size : {"x", "0", "-1GB", "5TB", "5 GB", "99999999999GB"}) {
    EXPECT_THAT(run(2, "export a --to b --max-shard-size '" + size + "'"),
                HasSubstr("give bytes, such as 500MB or 2GiB"));
  }
  EXPECT_THAT(run(2, "export a --to net.pt"), HasSubstr("give NAME.safetensors, or a folder"));
  EXPECT_THAT(run(2, "inspec a"), HasSubstr("the nearest is inspect"));
  EXPECT_THAT(run(0, "diff --help"), HasSubstr("Exit status: 0 when both are the same"));
}

// A script takes what is in the file for all there was when the status is 0.
TEST_F(Tool, OutputThatIsLostIsAnError) {
  const auto lost = [](const std::string& args) {
    return lockstep_tool(args + " 2>&1 > /dev/full; echo status $?").said;
  };
  for (const std::string& args : {"inspect " + one_, "inspect --json " + one_, "verify " + runs_}) {
    EXPECT_EQ(lost(args), fmt::format("lockstep: [{}] stdout cannot be written: No space left on "
                                      "device: make room, or redirect it to another place\n"
                                      "status 1\n",
                                      args.substr(0, args.find(' '))));
  }
  EXPECT_THAT(lost("diff " + one_ + " " + one_), testing::EndsWith("status 2\n"));
  for (const std::string help : {"--help", "train --help", "sweep --help"}) {
    EXPECT_THAT(lost(help), AllOf(HasSubstr("] stdout"), testing::EndsWith("status 1\n")));
  }
}

TEST_F(Tool, MergeAssemblesBoxes) {
  run(0, "merge " + runs_ + " --to " + out("all.safetensors"));
  const Safetensors file(out("all.safetensors"));
  ASSERT_EQ(file.tensors().size(), 2u);
  const std::vector<float> expected(12, 2.5);
  EXPECT_EQ(file.bytes(file.tensors().at("weight")), bytes_of(expected));
  EXPECT_EQ(file.metadata().at("step"), "2");
  EXPECT_THAT(run(1, "merge " + one_ + " --to " + out("all.safetensors")),
              HasSubstr("all.safetensors: is there already"));
  run(0, "merge --force " + one_ + " --to " + out("all.safetensors"));
  EXPECT_THAT(run(0, "diff " + one_ + " " + out("all.safetensors")),
              HasSubstr("2 tensors are the same"));
  EXPECT_THAT(run(1, "merge " + one_ + " --to " + out("none/all")),
              AllOf(HasSubstr(out("none/all: ")), HasSubstr("none/.tmp-"),
                    HasSubstr("-all, as which it begins: cannot be made")));
}

TEST_F(Tool, MergeOfADamagedOneWritesNothing) {
  flip_last_bit(one_ + "/shard-1-of-2.safetensors");
  EXPECT_THAT(run(1, "merge " + one_ + " --to " + out("all")),
              HasSubstr("tensor 'weight' is damaged"));
  EXPECT_THAT(checkpoint::names_in(checkpoint::system_files(), folder_.path()),
              testing::Each(Not(HasSubstr("all"))));
}

// Boxes of two columns, and of three dimensions, come to their places.
TEST_F(Tool, MergeOfBoxesThatAreNoRows) {
  checkpoint::Directory directory(folder_ / "boxes");
  const std::string folder = directory.begin(1);
  checkpoint::Manifest manifest;
  write_part(checkpoint::system_files(), folder, "a",
             {{"w", {2, 4}, {{0, 0}, {2, 1}}, {0, 4}},
              {"v", {2, 2, 2}, {{0, 1, 0}, {2, 1, 2}}, {2, 3, 6, 7}}},
             manifest);
  write_part(checkpoint::system_files(), folder, "b",
             {{"w", {2, 4}, {{0, 1}, {2, 3}}, {1, 2, 3, 5, 6, 7}},
              {"v", {2, 2, 2}, {{0, 0, 0}, {2, 1, 2}}, {0, 1, 4, 5}}},
             manifest);
  directory.publish(manifest);
  run(0, "merge " + out("boxes") + " --to " + out("all"));
  const Safetensors file(out("all"));
  const std::vector<float> expected{0, 1, 2, 3, 4, 5, 6, 7};
  EXPECT_EQ(file.bytes(file.tensors().at("w")), bytes_of(expected));
  EXPECT_EQ(file.bytes(file.tensors().at("v")), bytes_of(expected));
}

// A file of one tensor for each name.
void write_tensors(const std::string& path,
                   const std::map<std::string, std::vector<float>>& tensors,
                   const std::map<std::string, std::string>& metadata = {}) {
  std::vector<checkpoint::TensorToWrite> all;
  for (const auto& [name, values] : tensors) {
    all.push_back({name, dtype("F32"), {static_cast<int64_t>(values.size())}, bytes_of(values)});
  }
  checkpoint::write_safetensors(path, all, metadata);
}

TEST_F(Tool, ExportChoosesAndStripsNames) {
  write_tensors(out("x"),
                {{"net/a.w", {1}}, {"net/b.w", {2}}, {"adam/m/net/a.w", {3}}, {"nets", {4}}},
                {{"net/tied", "net/a.w"}, {"note", "kept?"}});
  const auto names = [&](const std::string& args) {
    run(0, "export " + out("x") + " --force --to " + out("y.safetensors") + " " + args);
    const Safetensors file(out("y.safetensors"));
    std::string all;
    for (const auto& [name, tensor] : file.tensors()) all += name + " ";
    for (const auto& [name, text] : file.metadata()) all += name + "=" + text + " ";
    return all;
  };
  EXPECT_EQ(names(""), "adam/m/net/a.w net/a.w net/b.w nets format=pt net/tied=net/a.w ");
  EXPECT_EQ(names("--only net"), "a.w b.w format=pt tied=a.w ");
  EXPECT_EQ(names("--only net/a"), "w format=pt ");
  EXPECT_EQ(names("--only 'net/*' nets"), "net/a.w net/b.w nets format=pt net/tied=net/a.w ");
  EXPECT_EQ(names("--only net/tied"), "net/tied format=pt ");
  EXPECT_THAT(run(1, "export " + out("x") + " --to " + out("z") + " --only nothing"),
              HasSubstr("no tensor is called 'nothing', or is below it"));
  EXPECT_THAT(run(1, "export " + out("x") + " --to " + out("z") + " --only net adam/m/net"),
              HasSubstr("both 'adam/m/net/a.w' and 'net/a.w' would be called 'a.w'"));
}

TEST_F(Tool, ExportIntoAFolderOfShards) {
  write_tensors(out("x"), {{"a", std::vector<float>(10, 1)},
                           {"b", std::vector<float>(10, 2)},
                           {"c", std::vector<float>(50, 3)},
                           {"d", {4}}});
  const std::string folder = out("hf");
  run(0, "export " + out("x") + " --to " + folder + "/ --max-shard-size 100B");
  EXPECT_THAT(
      checkpoint::names_in(checkpoint::system_files(), folder),
      testing::ElementsAre("model-00001-of-00003.safetensors", "model-00002-of-00003.safetensors",
                           "model-00003-of-00003.safetensors", "model.safetensors.index.json"));
  const auto index = nlohmann::json::parse(contents(folder + "/model.safetensors.index.json"));
  EXPECT_EQ(index["metadata"]["total_size"], 284);
  EXPECT_EQ(index["weight_map"]["b"], "model-00001-of-00003.safetensors");
  EXPECT_EQ(index["weight_map"]["d"], "model-00003-of-00003.safetensors");
  EXPECT_THAT(run(0, "diff " + out("x") + " " + folder), HasSubstr("4 tensors are the same"));
  EXPECT_THAT(run(0, "verify " + folder), HasSubstr("whole"));
  EXPECT_THAT(run(1, "export " + out("x") + " --to " + folder), HasSubstr("is there already"));
  run(0, "export " + out("x") + " --force --to " + folder);
  EXPECT_THAT(checkpoint::names_in(checkpoint::system_files(), folder),
              testing::ElementsAre("model.safetensors"));
  EXPECT_THAT(run(0, "diff " + out("x") + " " + folder), HasSubstr("4 tensors are the same"));
}

// Of an earlier export only what that has written is replaced, with all its shards.
TEST_F(Tool, ExportIntoAFolderLeavesOthersFilesAlone) {
  const std::string folder = out("hf");
  std::filesystem::create_directory(folder);
  write_tensors(folder + "/model-best.safetensors", {{"a", {1}}});
  write(folder + "/model-00001-of-00002.safetensors.bak", "mine");
  run(0, "export " + one_ + " --to " + folder);
  run(0, "export " + two_ + " --force --to " + folder + " --max-shard-size 50B");
  run(0, "export " + one_ + " --force --to " + folder);
  EXPECT_THAT(checkpoint::names_in(checkpoint::system_files(), folder),
              testing::ElementsAre("model-00001-of-00002.safetensors.bak", "model-best.safetensors",
                                   "model.safetensors"));
}

TEST_F(Tool, FoldersWhoseIndexIsWrongAreRefused) {
  write_tensors(out("m.safetensors"), {{"a", {1}}, {"b", {2}}});
  const auto told = [&](const std::string& map) {
    write(out("model.safetensors.index.json"), "{\"weight_map\": " + map + "}");
    return run(1, "inspect " + out("model.safetensors.index.json"));
  };
  const std::string a = "\"a\": \"m.safetensors\"";
  EXPECT_THAT(told("{" + a + "}"), HasSubstr("does not say that 'b' is in 'm.safetensors'"));
  EXPECT_THAT(told("{" + a + ", \"c\": \"m.safetensors\"}"),
              HasSubstr("says that 'c' is in 'm.safetensors', and it is not"));
  EXPECT_THAT(told("{\"a\": \"n.safetensors\"}"), HasSubstr("n.safetensors: cannot be opened"));
  EXPECT_THAT(told("{\"a\": \"../m.safetensors\"}"),
              HasSubstr("is not the name of a file beside it"));
  EXPECT_THAT(told("{\"a\": 3}"), HasSubstr("is not the name of a file beside it"));
  EXPECT_THAT(told("[]"), HasSubstr("has no weight_map"));
}

// As long texts, and with what would move the lines of a terminal, they are one short line each.
TEST_F(Tool, DiffAndInspectShowLongValuesCutAndEscaped) {
  checkpoint::Directory directory(out("values"));
  std::vector<std::string> saved;
  for (int64_t step = 1; step <= 2; ++step) {
    directory.begin(step);
    checkpoint::Manifest manifest{.step = step, .world = 1};
    manifest.values["note"] = fmt::format("{}\tb\n\u00e9", step) + std::string(5600, 'x');
    saved.push_back(directory.publish(manifest));
  }
  const std::string said = run(1, "diff " + saved[0] + " " + saved[1]);
  EXPECT_THAT(said, AllOf(HasSubstr("value note: 1\\x09b\\x0a\u00e9xxx"),
                          HasSubstr("xxx... (5606 bytes) and 2\\x09b")));
  EXPECT_LT(said.size(), 600U);
  EXPECT_THAT(run(0, "inspect " + saved[0]),
              AllOf(HasSubstr("  note  1\\x09b\\x0a"), HasSubstr("x... (5606 bytes)\n")));
}

// As a Trainer saves learning rates, with all bits.
TEST_F(Tool, NumbersInTextsAreShownAsDecimals) {
  checkpoint::Directory directory(out("rates"));
  std::vector<std::string> saved;
  for (const std::string rate : {"0x1.8p-3", "-0x1p+1"}) {
    directory.begin(std::ssize(saved) + 1);
    checkpoint::Manifest manifest{.step = std::ssize(saved) + 1, .world = 1};
    manifest.values["base_rates"] = "model/0\t" + rate + "\nmodel/1\tinf\n";
    saved.push_back(directory.publish(manifest));
  }
  EXPECT_THAT(run(1, "diff " + saved[0] + " " + saved[1]),
              HasSubstr("value base_rates: model/0 0.1875 model/1 inf and model/0 -2 model/1 inf\n"
                        "0 tensors are the same, 1 difference\n"));
  EXPECT_THAT(run(0, "inspect " + saved[0]), HasSubstr("base_rates  model/0 0.1875 model/1 inf\n"));
  EXPECT_THAT(run(0, "inspect " + one_ + " --only bias"), HasSubstr("1 tensor, 12 B"));
}

TEST_F(Tool, DiffSaysWhichTensorsAndByHowMuch) {
  EXPECT_THAT(run(0, "diff " + one_ + " " + one_),
              HasSubstr("2 tensors are the same, 0 differences"));
  EXPECT_THAT(run(1, "diff " + one_ + " " + two_),
              AllOf(HasSubstr("bias: 3 of 3 elements differ, by at most 1, relative 0.4\n"),
                    HasSubstr("weight: 12 of 12 elements differ"), HasSubstr("2 differences")));
  run(0, "diff --atol 1 " + one_ + " " + two_);
  run(1, "diff --atol 0.9 " + one_ + " " + two_);
  run(0, "diff --rtol 0.4 " + one_ + " " + two_);
  EXPECT_THAT(run(1, "diff " + one_ + " " + two_ + " --only bias"), Not(HasSubstr("weight")));
}

TEST_F(Tool, DiffOfNamesShapesNansAndBits) {
  constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
  write_tensors(out("a"),
                {{"gone", {1}}, {"n", {kNan, kNan, 1, 2}}, {"zero", {0.0f, 1}}, {"s", {1, 2}}});
  write_tensors(out("b"),
                {{"more", {1}}, {"n", {kNan, 1, kNan, 5}}, {"zero", {-0.0f, 1}}, {"s", {1}}});
  const std::string said = run(1, "diff " + out("a") + " " + out("b"));
  EXPECT_THAT(
      said, AllOf(HasSubstr("gone: only in " + out("a")), HasSubstr("more: only in " + out("b")),
                  HasSubstr("n: 3 of 4 elements differ, by at most 3, relative 0.6, 2 NaN on one "
                            "side only\n"),
                  HasSubstr("s: F32 [2] and F32 [1]\n"),
                  HasSubstr("zero: 0 of 2 elements differ, 1 have the same number in other bits")));
}

TEST_F(Tool, DiffNamesValues) {
  checkpoint::Directory directory(folder_ / "valued");
  std::vector<std::string> saved;
  for (const double rate : {0.1, 0.2}) {
    directory.begin(1);
    checkpoint::Manifest manifest;
    manifest.values["lr"] = rate;
    manifest.values["nan"] = std::nan("");
    if (rate == 0.2) manifest.values["on"] = true;
    saved.push_back(directory.publish(manifest));
  }
  EXPECT_THAT(run(1, "diff " + saved[0] + " " + saved[1]),
              AllOf(HasSubstr("value lr: 0.1 and 0.2\n"),
                    HasSubstr("value on: only in " + saved[1]), Not(HasSubstr("value nan"))));
}

}  // namespace
}  // namespace lockstep::test
