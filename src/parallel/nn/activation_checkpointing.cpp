#include "lockstep/parallel/activation_checkpointing.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Context.h>
#include <ATen/autocast_mode.h>
#include <fmt/format.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/torch.h>

#include <algorithm>
#include <memory>
#include <mutex>
#include <optional>
#include <string_view>
#include <utility>

#include "lockstep/core/error.h"
#include "lockstep/parallel/autocast.h"
#include "lockstep/parallel/call.h"
#include "parallel/ddp/packed.h"
#include "parallel/nn/parameter_paths.h"
#include "parallel/nn/recompute_checks.h"

namespace lockstep::parallel {
namespace {

using Tensors = CallLayer::Tensors;

// The generators of CPU and device, and which dtype operations choose: all that a second run needs
// to repeat the first.
class Surroundings {
 public:
  explicit Surroundings(at::Device device) : device_(device) {
    const bool chooses = at::autocast::is_autocast_enabled(device.type());
    dtype_ = chooses ? at::autocast::get_autocast_dtype(device.type()) : at::kFloat;
    remember(at::kCPU);
    if (!device.is_cpu()) remember(device);
  }

  at::Device device() const { return device_; }
  at::ScalarType dtype() const { return dtype_; }

  void restore_generators() const {
    for (auto [generator, state] : states_) {
      const std::lock_guard lock(generator.mutex());
      generator.set_state(state);
    }
  }

 private:
  void remember(at::Device device) {
    at::Generator generator = at::globalContext().defaultGenerator(device);
    const std::lock_guard lock(generator.mutex());
    states_.emplace_back(generator, generator.get_state());
  }

  at::Device device_;
  at::ScalarType dtype_;
  std::vector<std::pair<at::Generator, at::Tensor>> states_;
};

// As it was then, for as long as this lives.
class [[nodiscard]] Again {
 public:
  explicit Again(const Surroundings& then)
      : now_(then.device()), autocast_(then.device(), then.dtype()) {
    then.restore_generators();
  }
  ~Again() { now_.restore_generators(); }
  Again(const Again&) = delete;
  Again& operator=(const Again&) = delete;

 private:
  Surroundings now_;
  Autocast autocast_;
};

// The module's buffers that a run changes, as they were before it: the running statistics of a
// BatchNorm, which a second run would move once more, or the vectors of a spectral norm, from which
// it would compute other weights.
class BuffersBefore {
 public:
  explicit BuffersBefore(const torch::nn::Module& module) {
    const at::NoGradGuard no_grad;
    for (const auto& item : module.named_buffers()) {
      const at::Tensor& buffer = item.value();
      if (!buffer.defined() || buffer.layout() != at::kStrided) continue;
      all_.push_back({item.key(), buffer, own_elements(buffer).clone()});
    }
  }
  // After the run. On a device all are kept, because to look would be to wait for it.
  void forget_unchanged(const torch::nn::Module& module) {
    if (all_.empty()) return;
    const auto now = module.named_buffers();
    for (const auto& [name, buffer, value] : all_) {
      if (const auto* found = now.find(name); found == nullptr || !found->is_same(buffer))
        refuse_replaced(module, name);
    }
    std::erase_if(all_, [](const auto& item) {
      return item.buffer.is_cpu() && at::equal(own_elements(item.buffer), item.value);
    });
  }
  // Buffers have these values, and these become what buffers had. Versions are not counted: when
  // backward is over, buffers are as if there had been no second run.
  void exchange() {
    const at::NoGradGuard no_grad;
    // All before the first is written: some may share memory, or be one under two names.
    std::vector<at::Tensor> now;
    for (const auto& item : all_) now.push_back(own_elements(item.buffer).clone());
    for (size_t i = 0; i < all_.size(); ++i) {
      own_elements(all_[i].buffer).variable_data().copy_(all_[i].value);
      all_[i].value = now[i];
    }
  }

 private:
  struct Item {
    std::string name;
    at::Tensor buffer, value;
  };
  std::vector<Item> all_;
};

// What autograd keeps of the first run.
struct Run : torch::CustomClassHolder {
  CallLayer::Body body;
  std::shared_ptr<const torch::nn::Module> module;
  std::optional<Surroundings> surroundings;
  std::optional<BuffersBefore> buffers;
  std::optional<ParametersBefore> parameters;
  std::optional<ResultsBefore> results;
  std::shared_ptr<ParameterPaths::Elsewhere> elsewhere;
};

// Buffers are what the first run began with, for as long as this lives. A graph may be run backward
// again, so that these values are kept.
class [[nodiscard]] BuffersAgain {
 public:
  explicit BuffersAgain(const BuffersBefore& before) : buffers_(before) { buffers_.exchange(); }
  ~BuffersAgain() { buffers_.exchange(); }
  BuffersAgain(const BuffersAgain&) = delete;
  BuffersAgain& operator=(const BuffersAgain&) = delete;

 private:
  BuffersBefore buffers_;
};

// Both runs cast weights for themselves. A cast that the first one, whose graph is dropped, left in
// the cache of the caller's Autocast would lead the weight's later uses into that graph.
class [[nodiscard]] OwnCasts {
 public:
  OwnCasts() { at::autocast::set_autocast_cache_enabled(false); }
  ~OwnCasts() { at::autocast::set_autocast_cache_enabled(before_); }
  OwnCasts(const OwnCasts&) = delete;
  OwnCasts& operator=(const OwnCasts&) = delete;

 private:
  bool before_ = at::autocast::is_autocast_cache_enabled();
};

// What a first run returned, as tensors that may become results of Recompute. A buffer or parameter
// must not: it would be part of every later graph, and the second run would wait for itself. Nor a
// view, which libtorch would refuse to change in place. Aliases share the version, so that changes
// in place are noticed as without checkpointing. Only views of memory that another output has too
// stay views: after a change in place of one the other's gradient would be wrong.
// An argument that is returned is the caller's.
Tensors as_results(Tensors outputs, const Tensors& given, const Tensors& inputs) {
  const Tensors all = outputs;
  const auto shares_memory = [&](size_t i) {
    for (size_t other = 0; other < all.size(); ++other) {
      const at::Tensor& tensor = all[other];
      if (other == i || !tensor.defined() || tensor.layout() != at::kStrided) continue;
      if (all[i].is_alias_of(tensor)) return true;
    }
    return false;
  };
  for (size_t i = 0; i < outputs.size(); ++i) {
    at::Tensor& output = outputs[i];
    const auto is_it = [&](const at::Tensor& input) { return input.is_same(output); };
    if (!output.defined()) continue;
    if (const auto found = std::ranges::find_if(given, is_it); found != given.end()) {
      output = inputs[found - given.begin()];
    } else if (output.layout() == at::kStrided && output.is_view() && shares_memory(i)) {
      output = at::alias(output.detach());
    } else {
      output = output.detach();
    }
  }
  return outputs;
}

// Backward recomputes the module and runs a backward() of its own, which accumulates gradients into
// all of its parameters, also those that the caller's call is not about.
void refuse_other_than_backward() {
  const bool is_of_some = !torch::autograd::Engine::get_default_engine().is_checkpoint_valid();
  if (!is_of_some && !at::GradMode::is_enabled()) return;
  throw ConfigError(fmt::format(
      "[activation_checkpointing] {} through a module that is recomputed: only a backward() of "
      "all parameters knows what to do with the second run's gradients; leave the module out of "
      "ActivationCheckpointing",
      is_of_some ? "torch::autograd::grad(), or backward() with inputs,"
                 : "backward(create_graph = true)"));
}

// Of the second graph, which ends where the arguments begin: it alone has never run.
void run_backward(const Tensors& roots, const Tensors& gradients, const std::string& module) {
  try {
    torch::autograd::backward(roots, gradients);
  } catch (const c10::Error& error) {
    const std::string_view text = error.what_without_backtrace();
    if (text.find("backward through the graph a second time") == text.npos) throw;
    throw ConfigError(fmt::format(
        "[activation_checkpointing] forward() of {} computes with tensors that have a graph of "
        "their own and are used elsewhere, too, but were no arguments (within an object or "
        "captured, for instance): give it such tensors as arguments",
        module));
  }
}

// An argument as the first run sees it: the graph of that run, which tells what has a history,
// ends here.
struct Apart : torch::autograd::Function<Apart> {
  static at::Tensor forward(torch::autograd::AutogradContext* context, const at::Tensor& input,
                            const std::string& module) {
    context->saved_data["module"] = module;
    return input.detach();
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context,
                                                 const torch::autograd::variable_list&) {
    throw ConfigError(fmt::format(
        "[activation_checkpointing] backward came to a tensor that forward() of {} left elsewhere "
        "than in its results (in a member, for instance): let it return that tensor",
        context->saved_data["module"].toStringRef()));
  }
};

struct Recompute : torch::autograd::Function<Recompute> {
  // `paths` lead to the parameters, also where no argument wants a gradient.
  static torch::autograd::variable_list forward(torch::autograd::AutogradContext* context,
                                                const c10::intrusive_ptr<Run>& run,
                                                at::TensorList paths, at::TensorList inputs) {
    // An output that the loss does not use has no gradient, which is not a zero one: parameters
    // that only it depends on get none.
    context->set_materialize_grads(false);
    context->saved_data["run"] = c10::IValue::make_capsule(run);
    context->saved_data["paths"] = static_cast<int64_t>(paths.size());
    context->save_for_backward(inputs.vec());
    const OwnCasts casts;
    std::vector<int64_t> versions;
    for (const auto& input : inputs) versions.push_back(version_of(input));
    Tensors given, outputs;
    {
      const at::AutoGradMode enable_grad(true);
      for (const auto& input : inputs) {
        given.push_back(input.requires_grad() ? Apart::apply(input, run->module->name())
                                              : input.detach());
      }
      outputs = run->body(given);
    }
    refuse_changes(inputs.vec(), versions, run->module->name());
    run->buffers->forget_unchanged(*run->module);
    run->results.emplace(outputs);
    Tensors results = as_results(outputs, given, inputs.vec());
    Tensors without_history;
    for (size_t i = 0; i < outputs.size(); ++i) {
      if (outputs[i].defined() && !outputs[i].requires_grad())
        without_history.push_back(results[i]);
    }
    context->mark_non_differentiable(without_history);
    return results;
  }

  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context,
                                                 const torch::autograd::variable_list& gradients) {
    refuse_other_than_backward();
    const auto run =
        c10::static_intrusive_pointer_cast<Run>(context->saved_data["run"].toCapsule());
    run->parameters->refuse_changes(*run->module);
    run->elsewhere->find();
    Tensors inputs;
    for (const auto& kept : context->get_saved_variables()) {
      inputs.push_back(kept.defined() ? kept.detach().set_requires_grad(kept.requires_grad())
                                      : kept);
    }
    Tensors outputs, roots, root_gradients;
    const BuffersAgain buffers(*run->buffers);  // to the end: the second graph may have saved some
    {
      const Again again(*run->surroundings);
      const OwnCasts casts;
      const at::AutoGradMode enable_grad(true);
      outputs = run->body(inputs);
    }
    run->results->refuse_others(outputs, run->module->name());
    for (size_t i = 0; i < outputs.size(); ++i) {
      if (!outputs[i].defined() || !outputs[i].requires_grad() || !gradients[i].defined()) continue;
      roots.push_back(outputs[i]);
      root_gradients.push_back(gradients[i]);
    }
    if (!roots.empty()) run_backward(roots, root_gradients, run->module->name());
    torch::autograd::variable_list out(1 + context->saved_data["paths"].toInt());
    for (const auto& input : inputs) out.push_back(input.defined() ? input.grad() : at::Tensor());
    return out;
  }
};

// libtorch takes defined tensors only as arguments of a Function: the others stay aside.
CallLayer::Body on_defined(const Tensors& inputs, const CallLayer::Body& body) {
  std::vector<bool> is_defined;
  for (const auto& input : inputs) is_defined.push_back(input.defined());
  return [is_defined, body](const Tensors& defined) {
    auto next = defined.begin();
    Tensors all;
    for (const bool is : is_defined) all.push_back(is ? *next++ : at::Tensor());
    return body(all);
  };
}

}  // namespace

class ActivationCheckpointing::Layer : public CallLayer {
 public:
  explicit Layer(std::shared_ptr<torch::nn::Module> module)
      : module_(std::move(module)), attachment_(*module_, *this, CallDepth::Recompute) {}

  Tensors call(const Tensors& inputs, const Body& body) override {
    if (!at::GradMode::is_enabled() || !wants_gradient(inputs)) return body(inputs);
    const auto run = c10::make_intrusive<Run>();
    run->body = on_defined(inputs, body);
    run->module = module_;
    run->surroundings.emplace(device_of(inputs));
    run->buffers.emplace(*module_);
    run->parameters.emplace(*module_);
    const ParameterPaths paths(module_->parameters());
    run->elsewhere = paths.elsewhere();
    Tensors defined = inputs;
    std::erase_if(defined, [](const at::Tensor& tensor) { return !tensor.defined(); });
    return Recompute::apply(run, at::TensorList(paths.tensors()), at::TensorList(defined));
  }

 private:
  bool wants_gradient(const Tensors& inputs) const {
    const auto wants = [](const at::Tensor& tensor) {
      return tensor.defined() && tensor.requires_grad();
    };
    if (std::any_of(inputs.begin(), inputs.end(), wants)) return true;
    const auto parameters = module_->parameters();
    return std::any_of(parameters.begin(), parameters.end(), wants);
  }
  static at::Device device_of(const Tensors& inputs) {
    for (const auto& tensor : inputs) {
      if (tensor.defined()) return tensor.device();
    }
    return at::kCPU;
  }

  std::shared_ptr<torch::nn::Module> module_;
  CallAttachment attachment_;
};

ActivationCheckpointing::ActivationCheckpointing(
    std::vector<std::shared_ptr<torch::nn::Module>> modules) {
  for (auto& module : modules) {
    if (module == nullptr) throw ConfigError("[activation_checkpointing] a module is empty");
    layers_.push_back(std::make_unique<Layer>(std::move(module)));
  }
}

ActivationCheckpointing::~ActivationCheckpointing() = default;
ActivationCheckpointing::ActivationCheckpointing(ActivationCheckpointing&&) noexcept = default;

}  // namespace lockstep::parallel
