// What a file says, and what is said of a wrong one.
#include <gmock/gmock.h>

#include <cstdlib>
#include <string>
#include <vector>

#include "lockstep/train/config.h"
#include "lockstep/train/config_texts.h"
#include "support/thrown.h"
#include "train_config/read.h"

namespace lockstep::train {
namespace {

using testing::ElementsAre;
using testing::EndsWith;
using testing::HasSubstr;
using testing::Not;

TEST(LoadConfig, AnEmptyFileIsTheDefaults) {
  const auto config = read("");
  EXPECT_EQ(config.model.kind, "mlp");
  EXPECT_EQ(config.training.batch_size, 64);
  EXPECT_TRUE(config.origins.empty());
  EXPECT_TRUE(config.remarks.empty());
}

TEST(LoadConfig, SectionsAndGroups) {
  const auto config = read(R"(
model: {kind: mlp, hidden: [256, 128], activation: gelu}
optimizer:
  kind: sgd
  learning_rate: 1e-2
  momentum: 0.9
training:
  epochs: 3
  metrics: [accuracy]
  early_stopping: {metric: accuracy, patience: 2}
checkpoint: {directory: runs/a, save_strategy: steps, save_steps: 1_000}
)");
  EXPECT_THAT(config.model.mlp.hidden, ElementsAre(256, 128));
  EXPECT_EQ(config.model.mlp.activation, "gelu");
  EXPECT_EQ(config.optimizer.learning_rate, 1e-2);
  EXPECT_EQ(config.training.early_stopping.patience, 2);
  EXPECT_EQ(config.checkpoint.save_steps, 1000);
  EXPECT_EQ(config.origins.at("optimizer.momentum"), "run.yaml:6:3");
  EXPECT_FALSE(config.origins.contains("training.seed"));
}

TEST(LoadConfig, AKeyWithADotIsQuotedAsItIs) {
  EXPECT_THAT(refusal("trainer.seed: 1"),
              HasSubstr("run.yaml:1:1: unknown key 'trainer.seed'; it is training.seed"));
  EXPECT_THAT(refusal("training: {a.b: 1}"),
              HasSubstr("unknown key 'b' in training.a; `lockstep config reference`"));
}

TEST(LoadConfig, AKeyThatIsLikeNoOtherNamesNone) {
  EXPECT_EQ(
      refusal("hub_model_id: x\n"),
      "[config] run.yaml:1:1: unknown key 'hub_model_id'; `lockstep config reference` lists all "
      "keys");
  EXPECT_THAT(refusal("", {"model.foo=1"}),
              HasSubstr("unknown key 'foo' in model; `lockstep config reference` lists all"));
  EXPECT_THAT(refusal("", {"foo.x=1"}), HasSubstr("unknown section 'foo'; sections are model, "));
  EXPECT_THAT(refusal("optimizer: zzz\n"), EndsWith("is not one of sgd, adam, adamw"));
  EXPECT_THAT(refusal("training: {curriculum: [{zzz: 1}]}\n"),
              EndsWith("unknown key 'zzz'; a stage has epochs, fraction, path, targets_path"));
}

TEST(LoadConfig, AFileOfAnotherProgramIsToldWhereItBelongs) {
  EXPECT_EQ(refusal("program: three_domain\nbeta: 0"),
            "[config] run.yaml:1:10: a file with 'program' has that program's flags for keys: "
            "`lockstep train FILE` starts it; this command is for the trainer's own files");
}

TEST(LoadConfig, AnErrorIsOneLineWhateverItRepeats) {
  EXPECT_EQ(refusal("", {"\n  a\x7f"}),
            "[config] --set \\x0a  a\\x7f: expected KEY=VALUE, as training.seed=3");
  EXPECT_THAT(refusal("", {"trai\nning.seed=1"}),
              HasSubstr("unknown section 'trai\\x0aning'; the nearest is training"));
}

TEST(LoadConfig, OneWordForASectionIsItsKind) {
  const auto config = read("optimizer: sgd\nschedule: cosine\nmixed_precision: bf16\n");
  EXPECT_EQ(config.optimizer.kind, "sgd");
  EXPECT_EQ(config.schedule.kind, "cosine");
  EXPECT_EQ(config.mixed_precision.dtype, "bf16");
}

TEST(LoadConfig, NothingBehindAKeySaysNothing) {
  const auto config = read("checkpoint:\n  resume:\ntraining:\nresume_from_checkpoint: null\n");
  EXPECT_EQ(config.checkpoint.resume, "");
  EXPECT_TRUE(config.origins.empty());
}

TEST(LoadConfig, AllErrorsAtOnceEachWithItsLine) {
  const std::string text = refusal(R"(trainin:
  epochs: 2
training:
  epoch: 2
  batch_size: many
  seed: -1
optimizer:
  kind: adma
  learning_rate: [1]
schedule: {kind: cosine, kind: step}
)");
  EXPECT_THAT(text, HasSubstr("run.yaml: 7 errors"));
  EXPECT_THAT(text, HasSubstr("run.yaml:1:1: unknown key 'trainin'; the nearest is training"));
  EXPECT_THAT(text,
              HasSubstr("run.yaml:4:3: unknown key 'epoch' in training; the nearest is epochs"));
  EXPECT_THAT(text, HasSubstr("run.yaml:5:15: batch_size: 'many' is not a whole number; expected a "
                              "whole number, 1 or more"));
  EXPECT_THAT(refusal("seed: 18446744073709551615"),
              HasSubstr("'18446744073709551615' is not a whole number of 64 bits, up to "
                        "9223372036854775807"));
  EXPECT_THAT(text, HasSubstr("run.yaml:6:9: seed: '-1' is not a whole number, 0 or more"));
  EXPECT_THAT(text, HasSubstr("run.yaml:8:9: kind: 'adma' is not one of sgd, adam, adamw; the "
                              "nearest is adam"));
  EXPECT_THAT(text, HasSubstr("run.yaml:9:18: learning_rate: a list of 1 item is not a number"));
  EXPECT_THAT(text, HasSubstr("run.yaml:10:26: 'kind' is there twice, first in run.yaml:10:12"));
}

TEST(LoadConfig, StepsOfATraceAreAFirstAndALastOne) {
  const auto told = [](const std::string& steps) {
    return refusal("logging: {output_dir: run, trace_steps: " + steps + "}\n");
  };
  for (const char* const steps : {"[5]", "[5, 4]", "[1, 2, 3]", "[1, 1001]"}) {
    EXPECT_EQ(told(steps),
              "[config] run.yaml:1:28: logging.trace_steps: give the first and the last of at most "
              "1,000 steps, as in [10, 12]");
  }
  for (const char* const steps : {"[0, 4]", "[1.5, 4]", "[a, 4]", "soon", "{first: 3}"}) {
    EXPECT_THAT(told(steps), HasSubstr("run.yaml:1:41: trace_steps: "));
    EXPECT_THAT(told(steps), HasSubstr("a list of whole numbers, 1 or more"));
  }
  EXPECT_THAT(refusal("logging: {trace_steps: [3, 4]}\n"),
              HasSubstr("logging.trace_steps: needs logging.output_dir"));
  EXPECT_EQ(read("logging: {output_dir: run, trace_steps: [3, 4]}\n").logging.trace_steps,
            (std::vector<int64_t>{3, 4}));
}

TEST(LoadConfig, ItsTextsAreThoseOfTheEffectiveConfiguration) {
  const auto config = read("training: {seed: 7}\noptimizer: sgd\n");
  const auto texts = config_texts(config);
  EXPECT_EQ(texts.at("training.seed"), "7");
  EXPECT_EQ(texts.at("optimizer.kind"), "sgd");
  EXPECT_EQ(texts.at("training.batch_size"), "64");
  EXPECT_FALSE(texts.contains("parallel.fsdp.sharding_strategy"));
}

TEST(LoadConfig, AKeyOfAnotherSectionIsNamed) {
  EXPECT_EQ(refusal("training:\n  learning_rate: 1\n"),
            "[config] run.yaml:2:3: unknown key 'learning_rate' in training; it is "
            "optimizer.learning_rate");
  EXPECT_EQ(refusal("checkpoint:\n  output_dir: x\n"),
            "[config] run.yaml:2:3: unknown key 'output_dir' in checkpoint; it is "
            "logging.output_dir");
}

TEST(LoadConfig, AKeyOfAnotherKindIsRefused) {
  EXPECT_EQ(refusal("optimizer:\n  momentum: 0.9\n"),
            "[config] run.yaml:2:3: optimizer.momentum belongs to optimizer.kind sgd, and "
            "optimizer.kind is adam (the default)");
  EXPECT_THAT(
      refusal("model: {kind: mlp, hidden: [1]}", {"model.kind=linear"}),
      HasSubstr(
          "run.yaml:1:20: model.hidden belongs to model.kind mlp, transformer, and model.kind is "
          "linear (--set model.kind=linear)"));
}

TEST(LoadConfig, AnUnknownKindIsOneErrorAndNotOneForEachOfItsKeys) {
  EXPECT_THAT(refusal("model: {kind: mpl, hidden: [1]}"),
              testing::StartsWith("[config] run.yaml:1:15: kind: 'mpl' is not one of"));
}

TEST(LoadConfig, QuotedNumbersAreTexts) {
  EXPECT_THAT(
      refusal("seed: '3'"),
      HasSubstr("seed: '3' is not a whole number, because of its quotes: write it without"));
  EXPECT_THAT(refusal("seed: 'x'"), Not(HasSubstr("quotes")));
  EXPECT_EQ(read("launch: {nproc_per_node: 2}").launch.nproc_per_node, "2");
}

TEST(LoadConfig, NumbersAsPeopleWriteThem) {
  EXPECT_EQ(read("learning_rate: 1").optimizer.learning_rate, 1.0);
  EXPECT_EQ(read("learning_rate: 3e-4").optimizer.learning_rate, 3e-4);
  EXPECT_EQ(read("max_steps: 1e3").training.max_steps, 1000);
  for (const char* wrong :
       {"0x10", "1.5", "1e30", ".nan", "--1", "1 2", "1__0", "9223372036854775808"}) {
    EXPECT_THAT(refusal(std::string("max_steps: ") + wrong), HasSubstr("run.yaml:1:12")) << wrong;
  }
  for (const char* wrong : {".nan", ".inf", "inf", "nan", "1e999", "1,5"}) {
    EXPECT_THAT(refusal(std::string("learning_rate: ") + wrong), HasSubstr("is not a number"))
        << wrong;
  }
}

TEST(LoadConfig, WhatIsNoYamlHasALine) {
  EXPECT_THAT(refusal("training:\n  epochs: [1\nseed: 2\n"), HasSubstr("run.yaml:3:"));
  EXPECT_THAT(refusal("training: 1"), HasSubstr("run.yaml:1:11: section training is '1'"));
  EXPECT_THAT(refusal("- 1\n- 2\n"), HasSubstr("run.yaml:1:1: expected sections"));
  EXPECT_THAT(refusal("seed: 1\n---\nseed: 2\n"), HasSubstr("a second document"));
  EXPECT_THAT(refusal(",\x84"), HasSubstr("run.yaml:1:1: "));  // YAML::LoadAll() never returns
  EXPECT_THAT(refusal("model:\n\tkind: mlp\n"), HasSubstr("the line is indented with a tab"));
  EXPECT_THAT(refusal("? [a, b]\n: 1\n"), HasSubstr("a key has to be a word"));
  EXPECT_THAT(refusal(std::string(2 << 20, ' ')), HasSubstr("a configuration has at most"));
}

TEST(LoadConfig, OverridesGoBeforeTheFileAndTheLastOneCounts) {
  const auto config = read("seed: 1\nmodel: linear\n",
                           {"seed=2", "training.seed=3", "model=mlp", "model.hidden=[8, 8]"});
  EXPECT_EQ(config.training.seed, 3);
  EXPECT_EQ(config.origins.at("training.seed"), "--set training.seed=3");
  EXPECT_THAT(config.model.mlp.hidden, ElementsAre(8, 8));
  EXPECT_EQ(read("seed: 1\n", {"training={seed: 7, epochs: 2}"}).training.seed, 7);
  EXPECT_EQ(read("checkpoint: {directory: x}", {"checkpoint.directory="}).checkpoint.directory, "");
}

TEST(LoadConfig, WrongOverridesAreQuoted) {
  const std::string text =
      refusal("sed: 1\n", {"training.sed=3", "seed", "trainin.seed=1", "seed=x", "seed=[1"});
  EXPECT_THAT(text, HasSubstr("run.yaml: 6 errors"));
  EXPECT_THAT(text, HasSubstr("--set training.sed=3: unknown key 'sed' in training; the nearest is "
                              "seed"));
  EXPECT_THAT(text, HasSubstr("--set seed: expected KEY=VALUE"));
  EXPECT_THAT(text, HasSubstr("--set trainin.seed=1: unknown section 'trainin'"));
  EXPECT_THAT(text, HasSubstr("--set seed=x: seed: 'x' is not a whole number"));
  EXPECT_THAT(text, HasSubstr("--set seed=[1: not YAML"));
}

TEST(LoadConfig, VariablesGoBeforeTheFile) {
  setenv("ACCELERATE_MIXED_PRECISION", "bf16", 1);
  setenv("LOCKSTEP_BACKEND", "gloo", 1);
  const auto config = read("parallel: {backend: shm}\n");
  const std::string text = refusal("", {"parallel.backend=shm"});
  setenv("ACCELERATE_MIXED_PRECISION", "no", 1);
  const auto plain = read("mixed_precision: fp16", {"parallel.backend=gloo"});
  setenv("LOCKSTEP_MIXED_PRECISION", "no", 1);
  EXPECT_EQ(read("mixed_precision: fp16").mixed_precision.dtype, "no");
  unsetenv("LOCKSTEP_MIXED_PRECISION");
  setenv("ACCELERATE_MIXED_PRECISION", "bf61", 1);
  const std::string wrong = refusal("");
  unsetenv("ACCELERATE_MIXED_PRECISION");
  unsetenv("LOCKSTEP_BACKEND");
  EXPECT_EQ(config.mixed_precision.dtype, "bf16");
  EXPECT_EQ(config.parallel.backend, "gloo");
  EXPECT_EQ(config.origins.at("parallel.backend"), "environment LOCKSTEP_BACKEND=gloo");
  EXPECT_EQ(plain.mixed_precision.dtype, "fp16");
  EXPECT_THAT(text, HasSubstr("--set parallel.backend=shm: contradicts the environment "
                              "LOCKSTEP_BACKEND=gloo"));
  EXPECT_THAT(wrong, HasSubstr("environment ACCELERATE_MIXED_PRECISION=bf61: "));
}

TEST(LoadConfig, TlsIsAKeyAVariableAndNothingForGloo) {
  EXPECT_FALSE(read("").parallel.tls);
  EXPECT_TRUE(read("parallel: {tls: true}").parallel.tls);
  EXPECT_THAT(refusal("parallel: {tls: true, backend: gloo}"),
              HasSubstr("another parallel.backend than gloo, which encrypts nothing"));
  setenv("LOCKSTEP_TLS", "1", 1);
  const auto config = read("parallel: {tls: false}");
  const std::string text = refusal("", {"parallel.tls=false"});
  setenv("LOCKSTEP_TLS", "0", 1);
  const auto plain = read("parallel: {tls: true}");
  unsetenv("LOCKSTEP_TLS");
  EXPECT_TRUE(config.parallel.tls);
  EXPECT_EQ(config.origins.at("parallel.tls"), "environment LOCKSTEP_TLS=1");
  EXPECT_FALSE(plain.parallel.tls);
  EXPECT_THAT(text, HasSubstr("--set parallel.tls=false: contradicts the environment"));
}

TEST(LoadConfig, Curriculum) {
  const auto config = read(R"(
training:
  curriculum:
    - {epochs: 2, fraction: 0.25}
    - {path: other.csv}
)");
  EXPECT_EQ(read("data: {kind: npy, path: a, targets_path: b}\n"
                 "training: {curriculum: [{path: c, targets_path: d}]}")
                .training.curriculum[0]
                .targets_path,
            "d");
  ASSERT_EQ(config.training.curriculum.size(), 2U);
  EXPECT_EQ(config.training.curriculum[0].fraction, 0.25);
  EXPECT_EQ(config.training.curriculum[1].path, "other.csv");
  const std::string text = refusal(
      "training:\n  curriculum:\n    - {epoch: 1}\n    - 3\n    - {fraction: 2}\n"
      "    - {epochs: x}\n    - {epochs: 1, epochs: 2}\n");
  EXPECT_THAT(text,
              HasSubstr("run.yaml:3:8: curriculum: unknown key 'epoch'; the nearest is epochs"));
  EXPECT_THAT(text, HasSubstr("run.yaml:4:7: curriculum: '3' is not a stage"));
  EXPECT_THAT(text, HasSubstr("run.yaml:5:7: curriculum: fraction: a number above 0, at most 1"));
  // A key without a space behind its colon is a longer key without a value.
  EXPECT_THAT(refusal("training: {curriculum: [{epochs:5, fraction:0.1}]}"),
              HasSubstr("run.yaml:1:26: curriculum: unknown key 'epochs:5'"));
  EXPECT_EQ(
      read("training: {curriculum: [{epochs: , fraction: 0.1}]}").training.curriculum[0].epochs, 1);
  EXPECT_THAT(text, HasSubstr("run.yaml:6:16: curriculum: epochs: 'x' is not a whole number"));
  EXPECT_THAT(text, HasSubstr("run.yaml:7:19: curriculum: 'epochs' is there twice"));
  EXPECT_THAT(refusal("training: {curriculum: 3}"), HasSubstr("is not a list of stages"));
}

TEST(LoadConfig, KeysThatNeedOthers) {
  const auto expect = [](const std::string& text, const std::string& what) {
    EXPECT_THAT(refusal(text), HasSubstr(what)) << text;
  };
  expect("schedule: step", "run.yaml:1:1: schedule.kind step needs schedule.step_size");
  expect("schedule: {warmup_steps: 3, warmup_ratio: 0.1}", "give one of them");
  expect("schedule: {kind: multi_step, milestones: [3, 2]}", "they have to increase");
  expect("schedule: {kind: cosine, min_lr: 1}", "is above optimizer.learning_rate 0.001");
  expect("optimizer: {kind: sgd, nesterov: true}", "needs optimizer.momentum");
  expect("eval_strategy: steps", "needs training.eval_steps");
  expect("eval_steps: 3", "needs training.eval_strategy: steps");
  expect("save_steps: 3\nsave_strategy: epoch\noutput_dir: x",
         "needs checkpoint.save_strategy: steps");
  expect("resume_from_checkpoint: latest", "needs checkpoint.directory or logging.output_dir");
  expect("training: {early_stopping: {metric: accuracy}}",
         "'accuracy' is none of loss; training.metrics says");
  expect("training: {early_stopping: {patience: 9}}",
         "needs training.early_stopping.metric, such as loss");
  expect("parallel: {hook_fraction: 0.5}", "needs parallel.hook: top_k");
  expect("data: csv", "run.yaml:1:1: data.kind csv needs data.path");
  expect("launch: {nproc_per_node: 0}", "neither a number from 1 to 4096");
  expect("launch: {nnodes: '4:2'}", "neither a number nor MIN:MAX");
  expect("logging: {metrics_file: a/log.jsonl}", "a run's log is called metrics.jsonl");
  expect("data: {kind: npy, path: x.npy}", "data.kind npy needs data.targets_path");
  expect("training: {curriculum: [{path: y}]}\ndata: synthetic-regression",
         "synthetic-regression is in no files");
  expect("training: {curriculum: [{path: y}]}\ndata: {kind: npy, path: x, targets_path: z}",
         "training.curriculum: data.kind npy needs targets_path, too");
  expect("training: {curriculum: [{path: y, targets_path: z}]}\ndata: {kind: csv, path: x}",
         "data.kind csv has its targets in path");
  expect("schedule: {kind: plateau, warmup_steps: 3}", "plateau, which has no warm-up");
  expect("schedule: {kind: plateau, warmup_ratio: 0.1}", "plateau, which has no warm-up");
  expect("schedule: {kind: plateau, gamma: 1}", "run.yaml:1:27: schedule.gamma: 1 does not reduce");
  expect("schedule: {kind: one_cycle, rising: 1}", "schedule.rising: 1 leaves one_cycle no step");
  expect("checkpoint: {resume: /a/checkpoint}",
         "run.yaml:1:14: checkpoint.resume: needs checkpoint.directory or logging.output_dir");
  for (const std::string key : {"metrics: [mse]", "eval_batch_size: 3"}) {
    const std::string name = key.substr(0, key.find(':'));
    expect("training: {eval_strategy: no, " + key + "}",
           "training." + name + ": needs evaluations: training.eval_strategy is no");
  }
  // Defaults that are written say nothing.
  EXPECT_EQ(refusal("training: {eval_strategy: no, metrics: [], eval_batch_size: 0}\n"
                    "schedule: {kind: exponential, gamma: 1}\noutput_dir: x\n"
                    "checkpoint: {resume: /a/checkpoint}"),
            "nothing");
}

TEST(LoadConfig, RanksHaveNoBuffersOfTheirOwn) {
  EXPECT_THAT(refusal("parallel: {buffers: none}"),
              HasSubstr("buffers: 'none' is not one of broadcast, average"));
  EXPECT_THAT(refusal("ddp_broadcast_buffers: false"),
              HasSubstr("run.yaml:1:24: ddp_broadcast_buffers: false would let ranks have buffers "
                        "of their own"));
  EXPECT_EQ(read("broadcast_buffers: true").parallel.buffers, "broadcast");
}

TEST(LoadConfig, SaveStepsAloneMeansSteps) {
  const auto config = read("output_dir: x\nsave_steps: 3");
  EXPECT_EQ(config.checkpoint.save_strategy, "steps");
  EXPECT_THAT(show_config(config), HasSubstr("# because of save_steps in run.yaml:2:1\n"));
  EXPECT_EQ(read("output_dir: x\nsave_steps: 3\nsave_strategy: no").checkpoint.save_steps, 3);
}

TEST(LanguageModels, WhatGoesWithThem) {
  const auto expect = [](const std::string& file, const std::string& text) {
    EXPECT_THAT(refusal(file), HasSubstr(text));
  };
  expect("model: transformer",
         "run.yaml:1:1: model.kind: transformer learns from tokens, and "
         "data.kind fashion-mnist has none");
  expect("data: {kind: tokens, path: x}", "tokens are for model.kind transformer, and that is mlp");
  expect("training: {activation_checkpointing: full}", "needs model.kind: transformer");
  expect("training: {sample: {prompt: a}}", "needs model.kind: transformer");
  expect("training: {sample: {top_k: 3}}", "needs training.sample.prompt");
  const std::string data = "data: {kind: tokens, path: x, sequence_length: 2000}\n";
  expect(data + "model: {kind: transformer, hidden: 250}",
         "run.yaml:2:28: model.hidden: 250 is not a multiple of model.heads 4");
  expect(data + "model: {kind: transformer, kv_heads: 3}", "model.heads 4 is not a multiple of it");
  expect(data + "model: {kind: transformer, head_dim: 3}", "a head's width has to be even");
  expect(data + "model: transformer",
         "run.yaml:1:31: data.sequence_length: 2000 is above model.max_length 1024");
  expect(data + "model: {kind: transformer, pretrained: y, layers: 3}",
         "model.layers: model.pretrained gives the sizes");
  expect(data + "model: transformer\ntraining: {loss: mse, metrics: [auc], label_smoothing: 0.1}",
         "a transformer's is cross_entropy");
  expect(data + "model: transformer\ntraining: {metrics: [auc]}",
         "auc is none of a transformer's: perplexity, accuracy, top_k");
  const auto good = read(
      "model: {kind: transformer, max_length: 64}\nmetrics: [perplexity]\n"
      "data: {kind: tokens, path: x, sequence_length: 64}\ngradient_checkpointing: true\n"
      "training: {early_stopping: {metric: cross_entropy}, sample: {prompt: a, max_new_tokens: "
      "9}}");
  EXPECT_EQ(good.training.activation_checkpointing, "full");
  EXPECT_EQ(good.training.sample.prompt, "a");
}

TEST(LoadConfig, AFileThatIsNotThere) {
  EXPECT_THAT(test::message_of<ConfigError>([] { load_config("/none.yaml"); }),
              HasSubstr("/none.yaml: No such file"));
  EXPECT_THAT(test::message_of<ConfigError>([] { load_config("/tmp"); }),
              HasSubstr("it is a directory"));
}

TEST(ShowConfig, ReadsBackToItself) {
  const std::vector<std::string> files = {
      "",
      "model: {kind: linear, bias: false}\nloss: mse\noutput_dir: 'a \"b\": #c'\n",
      "data: {kind: csv, path: 'x: y.csv', delimiter: \"\\t\", targets: ['1', no]}\n"
      "training: {curriculum: [{fraction: 0.1, path: a b}], metrics: [top_k], top_k: 3}\n",
      "optimizer: {kind: sgd, learning_rate: 0.1234567890123, momentum: 1}\nlr_scaling: sqrt\n"
      "schedule: {kind: multi_step, milestones: [1, 2]}\nparallel: {hook: power_sgd, hook_rank: 3}",
  };
  for (const std::string& file : files) {
    const std::string shown = show_config(read(file));
    SCOPED_TRACE(shown);
    const RunConfig again = parse_config(shown, "shown.yaml");
    // The same but for the comments, which say where values came from.
    const auto without = [](std::string text) {
      std::string plain;
      for (size_t at = 0; at < text.size();) {
        const size_t end = text.find('\n', at);
        const std::string line = text.substr(at, end - at);
        plain += line.substr(0, line.rfind("  # ")) + "\n";
        at = end + 1;
      }
      return plain;
    };
    EXPECT_EQ(without(show_config(again)), without(shown));
  }
  EXPECT_THAT(show_config(read("seed: 3")), HasSubstr("# run.yaml:1:1\n"));
}

TEST(CheckConfig, WhatAProgramHasMadeIsCheckedAlike) {
  check_config({.model = {.kind = "linear"}, .training = {.epochs = 2}});
  const std::string text = test::message_of<ConfigError>([] {
    check_config({.optimizer = {.kind = "adma", .momentum = 0.5},
                  .training = {.batch_size = 0, .metrics = {"acuracy"}}});
  });
  EXPECT_THAT(text, HasSubstr("in the program: optimizer.kind: adma is not one of"));
  EXPECT_THAT(text, HasSubstr("training.batch_size: 0 is not a whole number, 1 or more"));
  EXPECT_THAT(text, HasSubstr("training.metrics: [acuracy] is not some of accuracy"));
}

}  // namespace
}  // namespace lockstep::train
