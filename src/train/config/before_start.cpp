#include "train/config/before_start.h"

#include <fmt/format.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <initializer_list>
#include <optional>
#include <string_view>
#include <tuple>
#include <utility>

#include "core/counted.h"
#include "lockstep/core/place.h"

namespace lockstep::train {
namespace {

bool is_in(const std::string& word, std::initializer_list<std::string_view> known) {
  return std::find(known.begin(), known.end(), word) != known.end();
}

// Of digits, 5 at most.
std::optional<int64_t> number_from_digits(const std::string& text) {
  const bool is_number =
      !text.empty() && text.size() < 6 &&
      std::all_of(text.begin(), text.end(), [](char c) { return c >= '0' && c <= '9'; });
  return is_number ? std::optional<int64_t>(std::stoll(text)) : std::nullopt;
}

void betas(const RunConfig& config, const Refuse& refuse) {
  const bool is_adam = is_in(config.optimizer.kind, {"adam", "adamw"});
  for (const auto& [name, beta] : {std::pair("optimizer.beta1", config.optimizer.beta1),
                                   std::pair("optimizer.beta2", config.optimizer.beta2)}) {
    if (is_adam && beta >= 1) refuse(name, "1 never forgets, and divides by 0: below 1");
  }
}

// Data that are known to have none to evaluate with; those of a program may have some.
void without_evaluation(const RunConfig& config, const Refuse& refuse) {
  const auto& [data, training] = std::tie(config.data, config.training);
  const bool has_none = is_in(data.kind, {"csv", "npy", "idx", "safetensors", "images", "tokens",
                                          "synthetic-regression"}) &&
                        data.validation_path.empty() && data.validation_fraction == 0;
  if (!has_none || training.eval_strategy == "no") return;
  const auto refuse_if = [&](const char* path, bool is_wanted) {
    if (!is_wanted) return;
    refuse(path,
           "there is no data to evaluate with; give data.validation_path or "
           "data.validation_fraction");
  };
  refuse_if("training.metrics", !training.metrics.empty());
  refuse_if("training.eval_steps", training.eval_steps > 0);
  refuse_if("training.sample.prompt", !training.sample.prompt.empty());
  refuse_if("training.early_stopping.metric", !training.early_stopping.metric.empty());
  refuse_if("checkpoint.best_metric", !config.checkpoint.best_metric.empty());
  refuse_if("schedule.kind", config.schedule.kind == "plateau");
}

// What the library's models give, where it is known, and what is made of it.
void outputs(const RunConfig& config, const Refuse& refuse) {
  const auto& [model, data, training] = std::tie(config.model, config.data, config.training);
  const int64_t given = model.kind == "linear"     ? model.linear.outputs
                        : model.kind == "mlp"      ? model.mlp.outputs
                        : model.kind == "convnet"  ? model.convnet.outputs
                        : model.kind == "resnet18" ? model.resnet18.outputs
                                                   : -1;
  if (given < 0) return;
  const bool has_digits = is_in(data.kind, {"mnist", "fashion-mnist"});
  const bool has_classes =
      has_digits || data.kind == "images" || (data.kind == "csv" && data.csv.classification);
  if (has_classes && given != 1 &&
      is_in(training.loss, {"mse", "l1", "huber", "bce_with_logits"})) {
    refuse("training.loss",
           fmt::format("{} compares element by element, and the targets of data.kind {} are class "
                       "numbers: use cross_entropy, or model.outputs: 1",
                       training.loss, data.kind));
  }
  if (training.loss == "nll") {
    refuse("training.loss", fmt::format("nll takes logarithms of probabilities, and model.kind {} "
                                        "gives scores: use cross_entropy",
                                        model.kind));
  }
  if (has_digits && given > 1 && given < 10 && is_in(training.loss, {"auto", "cross_entropy"})) {
    refuse("model.outputs", fmt::format("{} for the 10 classes of data.kind {}: as many, or leave "
                                        "it out",
                                        given, data.kind));
  }
  const int64_t outputs = given > 0 ? given : has_digits ? 10 : 0;
  const auto& metrics = training.metrics;
  if (outputs > 2 && std::find(metrics.begin(), metrics.end(), "auc") != metrics.end()) {
    refuse("training.metrics", fmt::format("auc is of two classes, and there are {}", outputs));
  }
}

// The tools take the folder of a run, too; to go on with, it has to be said from where.
void resumed(const RunConfig& config, const Refuse& refuse) {
  const std::string& from = config.checkpoint.resume;
  if (from.empty() || from == "latest") return;
  for (const std::string& folder : {from, from + "/checkpoints"}) {
    std::string name;
    std::error_code error;
    if (!(std::ifstream(folder + "/latest") >> name) ||
        !std::filesystem::is_directory(folder + "/" + name, error)) {
      continue;
    }
    refuse("checkpoint.resume", fmt::format("{} is a folder of checkpoints: name one, such as "
                                            "{}/{}, or write latest for this run's newest",
                                            folder, folder, name));
    return;
  }
  std::error_code error;
  if (!std::filesystem::is_directory(from, error) ||
      std::filesystem::exists(from + "/manifest.json", error)) {
    return;
  }
  refuse("checkpoint.resume", fmt::format("{} has no checkpoint: name the folder of one, such as "
                                          "RUN/checkpoints/step-00000100, or write latest for "
                                          "this run's newest",
                                          from));
}

// Lanes give the same on any number of ranks; what is not the same there is refused.
void lanes(const RunConfig& config, const Refuse& refuse) {
  const auto& parallel = config.parallel;
  if (parallel.lanes == 0) return;
  if (parallel.sync_bn) {
    refuse("parallel.sync_bn",
           "its statistics are over ranks, and parallel.lanes give the same on any number of "
           "them: leave out one");
  }
  if (parallel.hook != "none") {
    refuse("parallel.hook",
           "a hook is of ranks' gradients, and parallel.lanes have their own: "
           "leave out one");
  }
  // Within a launcher the section `launch` says nothing.
  const auto ranks = number_from_digits(config.launch.nproc_per_node);
  const auto hosts =
      number_from_digits(config.launch.nnodes.substr(0, config.launch.nnodes.find(':')));
  if (!ranks || !hosts || *ranks * *hosts <= parallel.lanes || !launcher_of_rank().empty()) return;
  refuse("parallel.lanes",
         fmt::format("{} for {} ranks (launch.nproc_per_node{}): at least as many",
                     lockstep::counted(parallel.lanes, "lane"), *ranks * *hosts,
                     *hosts > 1 ? ", launch.nnodes" : ""));
}

}  // namespace

void refuse_before_start(const RunConfig& config, const Refuse& refuse) {
  betas(config, refuse);
  without_evaluation(config, refuse);
  outputs(config, refuse);
  lanes(config, refuse);
  resumed(config, refuse);
}

}  // namespace lockstep::train
