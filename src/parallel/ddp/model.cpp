#include "parallel/ddp/model.h"

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <torch/nn/modules/batchnorm.h>
#include <torch/nn/modules/embedding.h>

#include <algorithm>
#include <unordered_map>
#include <unordered_set>

#include "comm/transport.h"
#include "lockstep/core/error.h"
#include "lockstep/core/log.h"
#include "parallel/ddp/consistency/fingerprint.h"
#include "parallel/ddp/packed.h"
#include "parallel/step/rank_stream.h"

namespace lockstep::parallel {
namespace {

// A rank that finds an error sends it instead of its description, so that all ranks throw it.
constexpr char kComplaint = '!';

std::vector<Named> once_each(const ModuleRef::NamedTensors& items) {
  std::vector<Named> named;
  std::unordered_set<const void*> seen;
  for (const auto& [name, tensor] : items) {
    if (seen.insert(tensor.unsafeGetTensorImpl()).second) {
      named.push_back({.name = name, .tensor = tensor});
    }
  }
  return named;
}

std::string describe(std::string_view kind, const Named& item, bool with_grad) {
  const at::Tensor& tensor = item.tensor;
  auto text = fmt::format("{} '{}': {} [{}]", kind, item.name, comm::name_of(tensor.scalar_type()),
                          fmt::join(tensor.sizes(), ", "));
  if (!tensor.is_contiguous()) {
    text += fmt::format(" with strides [{}]", fmt::join(tensor.strides(), ", "));
  }
  if (with_grad) text += tensor.requires_grad() ? ", trainable" : ", frozen";
  if (item.sparse) text += ", sparse gradient";
  return text;
}

// Errors in this rank's own model; empty when there are none.
std::string complaint(const Model& model, at::Device device) {
  const auto refuse = [&](std::string_view kind, const Named& item) -> std::string {
    const at::Tensor& tensor = item.tensor;
    const auto because = [&](std::string_view why) {
      return fmt::format("{} '{}' {}", kind, item.name, why);
    };
    if (tensor.layout() != at::kStrided) return because("is not dense");
    if (tensor.is_quantized()) return because("is quantized: keep it out of the module");
    if (tensor.is_inference()) {
      return because("was made under InferenceMode and cannot be written to: clone() it outside");
    }
    // A buffer that repeats its elements is the same on all ranks when those are.
    if (has_overlaps(tensor) || (tensor.requires_grad() && !own_elements(tensor).is_same(tensor))) {
      return because(fmt::format(
          "has elements that share a memory (sizes [{}], strides [{}]) and cannot be written to: "
          "clone() it, contiguously, before it is registered",
          fmt::join(tensor.sizes(), ", "), fmt::join(tensor.strides(), ", ")));
    }
    if (tensor.device() != device) {
      return fmt::format("{} '{}' is on {} but the group communicates on {}: module.to({}) first",
                         kind, item.name, tensor.device().str(), device.str(), device.str());
    }
    return {};
  };
  for (const auto& item : model.parameters) {
    if (auto text = refuse("parameter", item); !text.empty()) return text;
  }
  for (const auto& item : model.buffers) {
    if (auto text = refuse("buffer", item); !text.empty()) return text;
  }
  for (const auto& item : model.trainable()) {
    const at::ScalarType real = c10::toRealValueType(item.tensor.scalar_type());
    if (real == at::kFloat || real == at::kDouble || real == at::kHalf || real == at::kBFloat16) {
      continue;
    }
    return fmt::format("parameter '{}' is of {}, whose gradients no collective adds", item.name,
                       comm::name_of(item.tensor.scalar_type()));
  }
  return {};
}

constexpr size_t kPrintWidth = 16;

// Tells whether ranks were seeded differently.
std::string values_print(const Model& model) {
  uint64_t print = 0;
  for (const auto& item : model.parameters) print = print * 31 + first_values(item.tensor);
  return fmt::format("{:0{}x}", print, kPrintWidth);
}

// Weights of the Embedding layers whose options fit.
template <class Fits>
std::unordered_set<const void*> tables(const torch::nn::Module& module, const Fits& fits) {
  std::unordered_set<const void*> found;
  const auto add = [&](const auto* layer) {
    if (layer && fits(layer->options)) found.insert(layer->weight.unsafeGetTensorImpl());
  };
  for (const auto& layer : module.modules(/*include_self=*/false)) {
    add(layer->as<torch::nn::EmbeddingImpl>());
    add(layer->as<torch::nn::EmbeddingBagImpl>());
  }
  add(module.as<torch::nn::EmbeddingImpl>());
  add(module.as<torch::nn::EmbeddingBagImpl>());
  return found;
}

// By tensor: whether the layer whose running statistic it is trains now.
using TrainingByStatistic =
    std::unordered_map<const void*, std::shared_ptr<const std::function<bool()>>>;

// The running statistics of torch's layers. (Ours count the versions of theirs.)
TrainingByStatistic statistics(const torch::nn::Module& module) {
  TrainingByStatistic found;
  const auto add = [&](const torch::nn::Module& owner, const auto* layer) {
    if (layer == nullptr) return;
    const auto trains =
        std::make_shared<const std::function<bool()>>([owner = owner.weak_from_this()] {
          const auto alive = owner.lock();
          return alive && alive->is_training();
        });
    for (const auto& tensor : {layer->running_mean, layer->running_var}) {
      if (tensor.defined()) found[tensor.unsafeGetTensorImpl()] = trains;
    }
  };
  const auto add_any = [&](const torch::nn::Module& owner) {
    add(owner, owner.as<torch::nn::BatchNorm1dImpl>());
    add(owner, owner.as<torch::nn::BatchNorm2dImpl>());
    add(owner, owner.as<torch::nn::BatchNorm3dImpl>());
  };
  add_any(module);
  for (const auto& layer : module.modules(/*include_self=*/false)) add_any(*layer);
  return found;
}

// Of those that were scripted or traced in Python, which keep their names.
TrainingByStatistic statistics(const torch::jit::Module& module) {
  TrainingByStatistic found;
  for (const torch::jit::Module& layer : module.modules()) {
    const auto name = layer.type()->name();
    if (!name || !name->prefix().starts_with("__torch__.torch.nn.modules.batchnorm") ||
        !name->name().starts_with("BatchNorm")) {
      continue;
    }
    const auto trains =
        std::make_shared<const std::function<bool()>>([layer] { return layer.is_training(); });
    for (const char* statistic : {"running_mean", "running_var"}) {
      const c10::IValue value = layer.attr(statistic, c10::IValue());
      if (value.isTensor()) found[value.toTensor().unsafeGetTensorImpl()] = trains;
    }
  }
  return found;
}

std::string unknown_name(const ModelNotes& notes, std::string_view option, std::string_view name,
                         const std::vector<Named>& parameters) {
  std::vector<std::string> names;
  for (const auto& item : parameters) names.push_back("'" + item.name + "'");
  return fmt::format("{}::{} names '{}', but the module has no such {}; its parameters are {}",
                     notes.options, option, name,
                     option == "sparse" ? "parameter" : "parameter or buffer",
                     fmt::join(names, ", "));
}

std::vector<std::string> lines_of(std::string_view text) {
  std::vector<std::string> lines;
  while (!text.empty()) {
    const size_t end = std::min(text.find('\n'), text.size());
    lines.emplace_back(text.substr(0, end));
    text.remove_prefix(std::min(end + 1, text.size()));
  }
  return lines;
}

}  // namespace

std::unordered_set<const void*> renormalised_tables(const torch::nn::Module& module) {
  return tables(module, [](const auto& options) { return options.max_norm().has_value(); });
}

Model Model::of(const ModuleRef& ref, const ModelNotes& notes) {
  Model model{once_each(ref.parameters()), once_each(ref.buffers())};
  if (const torch::nn::Module* module = ref.module()) {
    const auto sparse = tables(*module, [](const auto& options) { return options.sparse(); });
    const auto renormalised = renormalised_tables(*module);
    for (auto& item : model.parameters) {
      item.sparse = sparse.contains(item.tensor.unsafeGetTensorImpl());
      item.renormalised = renormalised.contains(item.tensor.unsafeGetTensorImpl());
    }
  }
  const TrainingByStatistic training =
      ref.script() ? statistics(*ref.script()) : statistics(*ref.module());
  for (auto& item : model.buffers) {
    const auto statistic = training.find(item.tensor.unsafeGetTensorImpl());
    if (statistic != training.end()) item.trains = statistic->second;
  }
  for (const auto& name : notes.sparse) {
    const auto found = std::ranges::find(model.parameters, name, &Named::name);
    if (found == model.parameters.end()) {
      model.unknown = unknown_name(notes, "sparse", name, model.parameters);
      return model;
    }
    found->sparse = true;
  }
  for (const auto& name : notes.ignore) {
    const auto is_it = [&](const Named& item) { return item.name == name; };
    if (std::erase_if(model.parameters, is_it) + std::erase_if(model.buffers, is_it) == 0) {
      model.unknown = unknown_name(notes, "ignore", name, model.parameters);
      return model;
    }
  }
  return model;
}

std::vector<Named> Model::trainable() const {
  std::vector<Named> named;
  std::copy_if(parameters.begin(), parameters.end(), std::back_inserter(named),
               [](const Named& item) { return item.tensor.requires_grad(); });
  return named;
}

std::vector<at::Tensor> Model::tensors() const {
  std::vector<at::Tensor> all;
  for (const auto& item : parameters) all.push_back(item.tensor);
  for (const auto& item : buffers) all.push_back(item.tensor);
  return all;
}

std::vector<std::string> describe(const Model& model) {
  std::vector<std::string> lines;
  for (const auto& item : model.parameters) lines.push_back(describe("parameter", item, true));
  for (const auto& item : model.buffers) lines.push_back(describe("buffer", item, false));
  return lines;
}

std::string first_difference(const std::vector<std::vector<std::string>>& ranks) {
  const auto line_of = [&](size_t rank, size_t index) -> std::string {
    if (index < ranks[rank].size()) return ranks[rank][index];
    return fmt::format("nothing (it has {} parameters and buffers)", ranks[rank].size());
  };
  size_t most = 0;
  for (const auto& lines : ranks) most = std::max(most, lines.size());
  for (size_t index = 0; index < most; ++index) {
    for (size_t rank = 1; rank < ranks.size(); ++rank) {
      const std::string first = line_of(0, index), other = line_of(rank, index);
      if (first == other) continue;
      return fmt::format(
          "the ranks' models differ. First difference, at parameter or buffer {}:\n  rank 0 has "
          "{}\n  rank {} has {}\nBuild the same module on every rank",
          index, first, rank, other);
    }
  }
  return {};
}

at::Device communicated_on(const Group& group, const at::Tensor& tensor) {
  return group.carries(tensor.device()) ? tensor.device() : group.transport().device();
}

void verify(const Model& model, const Group& group, at::Device device, std::string mine,
            std::string_view who, const std::string& options) {
  if (!model.unknown.empty()) mine = model.unknown;
  if (mine.empty()) mine = complaint(model, device);
  mine = mine.empty() ? fmt::format("{}{}\n{}", values_print(model), options,
                                    fmt::join(describe(model), "\n"))
                      : kComplaint + mine;
  const std::string type = who == "fsdp" ? "Fsdp" : "Ddp";
  std::vector<std::vector<std::string>> ranks;
  std::vector<std::string> options_of_ranks;
  const auto texts = group.all_gather_bytes(mine, {.label = type + ": comparing models"});
  for (size_t rank = 0; rank < texts.size(); ++rank) {
    if (!texts[rank].empty() && texts[rank].front() == kComplaint) {
      throw ConfigError(fmt::format("[{}] rank {}: {}", who, rank, texts[rank].substr(1)));
    }
    auto& lines = ranks.emplace_back(lines_of(std::string_view(texts[rank]).substr(kPrintWidth)));
    options_of_ranks.push_back(std::move(lines.front()));
    lines.erase(lines.begin());
  }
  if (const auto text = first_difference(ranks); !text.empty()) {
    throw ConfigError(fmt::format("[{}] {} before {}", who, text, type));
  }
  const auto& all = options_of_ranks;
  if (const auto rank = std::ranges::find_if(all, [&](const auto& o) { return o != all[0]; });
      rank != all.end()) {
    throw ConfigError(fmt::format(
        "[{}] the ranks' options differ:\n  rank 0 has {}\n  rank {} has {}\nGive all ranks the "
        "same",
        who, all[0], rank - all.begin(), *rank));
  }
  const auto differs = [&](const std::string& text) {
    return text.compare(0, kPrintWidth, texts[0], 0, kPrintWidth) != 0;
  };
  const auto other = std::ranges::find_if(texts, differs);
  if (group.rank() != 0 || other == texts.end() || is_seeded_for_ranks()) return;
  log::warn(fmt::format(
      "[{}] rank {} begins with other parameters than rank 0, whose parameters all ranks get now. "
      "If the ranks were not meant to be seeded differently, call seed_everything(seed, world) "
      "before the module is built; nothing is wrong if rank 0 alone loaded a checkpoint",
      who, other - texts.begin()));
}

std::string rewritten_by_forward(const Model& model) {
  const auto found = std::ranges::find_if(model.parameters, &Named::renormalised);
  if (found == model.parameters.end()) return {};
  return fmt::format(
      "parameter '{}' belongs to an Embedding with max_norm, whose forward() writes to the rows of "
      "its batch, other ones on each rank: build it without, and renormalise all rows after each "
      "optimizer step, on all ranks",
      found->name);
}

}  // namespace lockstep::parallel
