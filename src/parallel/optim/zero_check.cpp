#include "parallel/optim/zero_check.h"

#include <c10/util/Type.h>
#include <fmt/format.h>
#include <fmt/ranges.h>
#include <torch/optim/adagrad.h>
#include <torch/optim/adam.h>
#include <torch/optim/adamw.h>
#include <torch/optim/lbfgs.h>
#include <torch/optim/rmsprop.h>
#include <torch/optim/sgd.h>
#include <torch/types.h>

#include <algorithm>
#include <optional>
#include <string_view>
#include <typeinfo>
#include <variant>

#include "checkpoint/optimizer_fields.h"
#include "checkpoint/part_of.h"
#include "comm/transport.h"
#include "lockstep/core/error.h"
#include "lockstep/core/log.h"
#include "parallel/ddp/consistency/fingerprint.h"
#include "parallel/ddp/model.h"
#include "parallel/ddp/reducer/accumulator.h"
#include "parallel/layout/overlap.h"

namespace lockstep::parallel {
namespace {

// A rank that finds an error sends it instead of its descriptions, so that all ranks throw it.
constexpr char kFault = '!';

std::string describe(const std::vector<at::Tensor>& parameters, size_t index) {
  return fmt::format("parameter {} of shape [{}]", index,
                     fmt::join(parameters[index].sizes(), ", "));
}

// Why this rank's parameters cannot be sharded; empty when they can.
std::string unfit(const std::vector<at::Tensor>& parameters, const Group& group) {
  if (parameters.empty()) return "no parameters to optimize";
  const at::Device device = communicated_on(group, parameters.front());
  for (size_t i = 0; i < parameters.size(); ++i) {
    const at::Tensor& parameter = parameters[i];
    const auto refuse = [&](std::string_view why) {
      return fmt::format("{} {}", describe(parameters, i), why);
    };
    if (checkpoint::part_of(parameter) != nullptr) {
      return refuse(
          "is an Fsdp's part of one, which is sharded already: give fsdp.parameters() to a plain "
          "optimizer");
    }
    if (parameter.layout() != at::kStrided) return refuse("is not dense");
    if (!parameter.is_non_overlapping_and_dense()) {
      return refuse("has overlapping or gapped memory");
    }
    if (parameter.device() != device) {
      return refuse(fmt::format("is on {}, but the group communicates on {}",
                                parameter.device().str(), device.str()));
    }
  }
  return tied_by_memory(parameters);
}

// Parameters of one shape are told apart by their places in a Ddp; without one, by their values.
std::string identity(const at::Tensor& parameter, size_t group) {
  std::string text = fmt::format("{} [{}] in group {}", comm::name_of(parameter.scalar_type()),
                                 fmt::join(parameter.sizes(), ", "), group);
  if (!parameter.is_contiguous()) {
    text += fmt::format(" with strides [{}]", fmt::join(parameter.strides(), ", "));
  }
  const std::string place = Accumulator::place_of(parameter);
  if (!place.empty()) return text + ", " + place;
  return text + fmt::format(", of no Ddp\t, with values of hash {:016x}", first_values(parameter));
}

std::vector<std::string> entries_of(std::string_view text) {
  std::vector<std::string> lines;
  for (size_t end; !text.empty(); text.remove_prefix(end + 1)) {
    end = text.find('\n');
    lines.emplace_back(text.substr(0, end));
  }
  return lines;
}

// The first line that differs: its number, the rank and both lines.
struct OtherEntry {
  size_t line;
  size_t rank;
  std::string first, other;
};

std::optional<OtherEntry> first_other(const std::vector<std::string>& texts) {
  const auto first = entries_of(texts[0]);
  for (size_t rank = 1; rank < texts.size(); ++rank) {
    if (texts[rank] == texts[0]) continue;
    const auto other = entries_of(texts[rank]);
    const auto at = [](const auto& lines, size_t i) {
      return i < lines.size() ? lines[i] : std::string("none there");
    };
    size_t i = 0;
    while (at(first, i) == at(other, i)) ++i;
    return OtherEntry{i, rank, at(first, i), at(other, i)};
  }
  return std::nullopt;
}

// Other values alone may be those of another seed, in the place of which a Ddp or a checkpoint
// gives the same ones later; those of another parameter are not.
std::optional<OtherEntry> first_other_parameter(const std::vector<std::string>& texts) {
  const auto sorted = [](std::vector<std::string> entries) {
    std::ranges::sort(entries);
    return entries;
  };
  for (size_t rank = 1; rank < texts.size(); ++rank) {
    std::vector<std::string> plain;
    for (const auto& text : {texts[0], texts[rank]}) {
      auto& all = plain.emplace_back();
      for (const auto& entry : entries_of(text)) all += entry.substr(0, entry.find('\t')) + "\n";
    }
    auto found = first_other(plain);
    if (!found && sorted(entries_of(texts[0])) == sorted(entries_of(texts[rank]))) {
      found = first_other({texts[0], texts[rank]});
    }
    if (!found) continue;
    found->rank = rank;
    for (auto* entry : {&found->first, &found->other}) std::erase(*entry, '\t');
    return found;
  }
  return std::nullopt;
}

std::string option_text(const checkpoint::Value& value) {
  return std::visit([](const auto& one) { return fmt::format("{}", one); }, value);
}

// What a class other than libtorch's makes of a parameter's part cannot be known.
void warn_of_parts(const torch::optim::Optimizer& inner, const Group& group) {
  using namespace torch::optim;
  const auto is_a = [&]<class... Kinds>() {
    return (... || (dynamic_cast<const Kinds*>(&inner) != nullptr));
  };
  if (group.rank() != 0 || is_a.operator()<Adam, AdamW, SGD, RMSprop, Adagrad, LBFGS>()) return;
  log::warn(fmt::format(
      "[zero] {} gets parts of the parameters, which have one dimension: the result is that of the "
      "whole optimizer only if it treats every element by itself, and another one, without an "
      "error, if it looks at a parameter's dimensions, mean or norm (centralised gradients, LAMB, "
      "LARS, Muon, Shampoo): use such a one as it is",
      c10::demangle(typeid(inner).name())));
}

}  // namespace

// Sharded parameters move to memory of their own.
std::string tied_by_memory(const std::vector<at::Tensor>& parameters) {
  const auto pair = first_overlap(parameters, parameters.size());
  if (!pair) return {};
  return fmt::format(
      "{} and {} are different tensors in the same memory, which division would take apart: to "
      "tie them, register one tensor under both names",
      describe(parameters, pair->first), describe(parameters, pair->second));
}

void check_same_parameters(const std::vector<torch::optim::OptimizerParamGroup>& groups,
                           const std::vector<at::Tensor>& all, const Group& group) {
  std::string mine = unfit(all, group);
  if (!mine.empty()) {
    mine = kFault + mine;
  } else if (group.size() > 1) {
    for (size_t i = 0; i < groups.size(); ++i) {
      for (const auto& parameter : groups[i].params()) mine += identity(parameter, i) + "\n";
    }
  }
  const auto texts = group.all_gather_bytes(mine, {.label = "zero: checking"});
  for (size_t rank = 0; rank < texts.size(); ++rank) {
    if (!texts[rank].starts_with(kFault)) continue;
    throw ConfigError(fmt::format("[zero] rank {}: {}", rank, texts[rank].substr(1)));
  }
  const auto found = first_other_parameter(texts);
  if (!found) return;
  throw ConfigError(fmt::format(
      "[zero] the ranks' parameters differ. First difference, at parameter {}:\n  rank 0 has {}\n"
      "  rank {} has {}\nGive every rank the same parameters in the same order, with the same "
      "values: a Ddp that is constructed first gives all ranks rank 0's",
      found->line, found->first, found->rank, found->other));
}

void check_same_options(const torch::optim::Optimizer& inner, const torch::optim::Optimizer& whole,
                        const Group& group) {
  if (group.size() == 1) return;
  std::string mine = c10::demangle(typeid(inner).name()) + "\n";
  for (const auto& [name, value] : checkpoint::option_values(whole)) {
    mine += fmt::format("{} = {}\n", name, option_text(value));
  }
  const auto found =
      first_other(group.all_gather_bytes(mine, {.label = "zero: comparing options"}));
  if (!found) {
    warn_of_parts(inner, group);
    return;
  }
  throw ConfigError(
      fmt::format("[zero] the ranks' optimizers differ: rank 0 has {}, rank {} has {}. Each rank "
                  "updates a part of the parameters for all: give all the same options",
                  found->first, found->rank, found->other));
}

void check_same_gradients(const std::vector<at::Tensor>& parameters, const Group& group) {
  std::string mine;
  std::vector<size_t> outside;
  for (size_t i = 0; i < parameters.size(); ++i) {
    if (Accumulator::listener_of(parameters[i]) == nullptr) outside.push_back(i);
  }
  // A program without any Ddp averages all of them itself.
  if (outside.empty() || outside.size() == parameters.size()) return;
  for (const size_t i : outside) {
    const at::Tensor& gradient = parameters[i].grad();
    mine += fmt::format("{:x}\n", gradient.defined() ? fingerprint(gradient) : 0);
  }
  const auto found =
      first_other(group.all_gather_bytes(mine, {.label = "zero: gradients of no Ddp"}));
  if (!found) return;
  throw ConfigError(fmt::format(
      "[zero] {} belongs to no Ddp, as others do, and its gradients differ between ranks 0 and {}: "
      "give it an optimizer of its own, or average its gradient before step()",
      describe(parameters, outside[std::min(found->line, outside.size() - 1)]), found->rank));
}

}  // namespace lockstep::parallel
