// docs/configuration.md, from what the reader knows.
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <string>
#include <vector>

#include "lockstep/train/config.h"
#include "train/config/flat_keys.h"
#include "train/config/schema.h"
#include "train/config/value.h"

namespace lockstep::train {
namespace {

constexpr const char* kBegin =
    R"(# Configuration

This page is written by `lockstep config reference`, and a test compares the two. One YAML file
describes a run:

```yaml
model: {kind: mlp, hidden: [256]}
data: fashion-mnist
optimizer: {kind: adam, learning_rate: 1e-3}
training: {epochs: 2, batch_size: 64, seed: 1}
```

| command | effect |
|---|---|
| `lockstep config init [FILE]` | writes a commented file to start from |
| `lockstep config check FILE` | reports all errors of a file, with line and column |
| `lockstep config show FILE` | shows every value and where it comes from |
| `lockstep train FILE` | trains; the file is checked before any rank is started |
| `lockstep sweep FILE --over KEY=V,V` | trains once for each combination of values, as many runs at a time as the cores allow; the best one is by the last evaluation, and with `checkpoint.restore_best` by the best one where it has the same metric |

All of them take `--set section.key=value`, any number of times; the value is YAML. If a key is set
twice, the last value is used.

## Precedence and errors

A value is taken from the command line, else from the environment, else from the file, else it is the
default. Of the environment these are read: what `lockstep run --config_file` and `accelerate launch`
set (`ACCELERATE_MIXED_PRECISION` unless it is no, `ACCELERATE_USE_CPU`, `ACCELERATE_USE_FSDP`, and
`FSDP_` with a key's name in capitals), and `LOCKSTEP_BACKEND`, `LOCKSTEP_DEVICE`,
`LOCKSTEP_TIMEOUT` and `LOCKSTEP_TLS` for `parallel.backend`, `parallel.device`,
`parallel.timeout_seconds` and `parallel.tls`; a `--set` that differs from one of these four is an
error, and so is one of `launch.threads_per_rank` that differs from `OMP_NUM_THREADS`. What the
launcher takes from `PET_` variables or a file of accelerate is environment, too: `--set
launch.nproc_per_node=1` goes before it, and a flag (`--nproc-per-node`) before that `--set`. The flag
`--mixed_precision`, also with `no`, goes before the file.

Unknown and repeated keys, and values of a wrong type or out of range, are errors. All errors of a
file are reported together, each with line and column (or the text of the `--set`, or the variable),
the most similar name, and what is allowed. A key without a value (`resume:`) is ignored. `1_000` and
`1e3` are the same number. A number in quotes is a text. A single value may be given for a list with
one element. Anchors and aliases work; merge keys (`<<`) do not. A file with nothing in it is a
run with all defaults, as `{}` is; a pipe with nothing in it is an error.

`lockstep train` and `lockstep sweep` read the file once, and their ranks, also those that start
again, get what was read. An edit counts from the next start on, and the file may be a pipe:
`lockstep train <(make_config)`. On several hosts each launcher reads its own. The ranks' `config.yaml`
has the flags that override the section `launch` (`--nproc-per-node`).

For `model`, `data`, `optimizer`, `schedule`, `weight_average` and `mixed_precision` a single word
gives the kind (for mixed precision the dtype): `optimizer: sgd`. A key of one kind is an error with
another kind.

## Programs with their own models

A program that calls `load_config()` may declare its own kinds of models, data sets and optimizers
with their keys, names of losses and metrics, and whole sections (`ConfigExtensions`). Its file is
checked just as strictly, and `show_config()` also shows these values.
)";

constexpr const char* kCurriculumText = R"(
`training.curriculum` is a list of stages that come before the epochs on all data, each a group of
keys: `epochs` (1), `fraction` (1: the first share of the samples, in the data set's order, of images
of each class, above 0),
`path` (other data of the same kind, with the classes and columns of `data.path`; empty: that) and
`targets_path` (npy, idx: the file of its targets or labels).
)";

constexpr const char* kFlatBegin = R"(
## Keys of other programs

Files that were written for the transformers Trainer, for accelerate, or with PyTorch's names are
read as they are: these keys stand at the top of the file, alone or beside sections. What has no
effect here is said once on start. Two keys that contradict each other are an error. What such a
file leaves out has the default of the tables above, which is not always the other program's: the
transformers Trainer, for one, means a learning rate of 5e-5, a linear decay, `max_grad_norm` 1,
and a weight decay of matrices only (`optimizer.weight_decay_of`).

| key | meaning here |
|---|---|
)";

constexpr const char* kFsdpText = R"(
Keys of accelerate's `fsdp_config`, with or without the prefix `fsdp_`, below `fsdp_config`, at the
top, or below `parallel.fsdp`, are those of `parallel.fsdp`; `offload_params` is `cpu_offload`, and
`sharding_strategy` may be a number from 1 to 4. Without `parallel.strategy: fsdp` they are errors:
accelerate itself ignores those without the prefix silently.
)";

std::string default_of(const Key& key) {
  if (key.required) return "needed";
  const std::string text = text_of(key.fallback);
  return text == "\"\"" ? "empty" : fmt::format("`{}`", text);
}

std::string values_of(const Key& key) {
  if (key.allowed.empty()) return range_of(key);
  const bool is_list = !std::holds_alternative<std::string>(key.fallback);
  return fmt::format("{}`{}`", is_list ? "a list of " : "", fmt::join(key.allowed, "`, `"));
}

}  // namespace

std::string config_reference() {
  const Schema schema(ConfigExtensions{});
  std::string page = kBegin;
  for (const std::string& section : schema.sections()) {
    page += fmt::format("\n## {}\n\n| key | values | default | |\n|---|---|---|---|\n", section);
    for (const Key& key : schema.keys()) {
      if (key.section() != section) continue;
      const std::string kinds =
          key.kinds.empty() ? "" : fmt::format(" ({})", fmt::join(key.kinds, ", "));
      page += fmt::format("| `{}`{} | {} | {} | {} |\n", key.name(), kinds, values_of(key),
                          default_of(key), key.description);
    }
    if (section == "training") page += kCurriculumText;
  }
  page += kFlatBegin;
  // Those that mean the same in one row.
  std::vector<std::pair<std::string, std::string>> rows;
  for (const FlatKey& key : flat_keys()) {
    const auto same = std::find_if(rows.begin(), rows.end(),
                                   [&key](const auto& row) { return row.second == key.meaning; });
    const std::string name = "`" + key.name + "`";
    if (same == rows.end()) {
      rows.emplace_back(name, key.meaning);
    } else {
      same->first += ", " + name;
    }
  }
  for (const auto& [names, meaning] : rows) page += fmt::format("| {} | {} |\n", names, meaning);
  return page + kFsdpText;
}

}  // namespace lockstep::train
