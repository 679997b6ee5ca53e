#include "data/loader/draws.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Context.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/library.h>

#include <algorithm>
#include <map>
#include <string>

#include "core/hash/mix.h"

namespace lockstep::data {
namespace {

using c10::DispatchKeySet;
using c10::IValue;
using torch::jit::Stack;

// A mode that libtorch registers nothing for: it has it for tests of its own.
constexpr auto kKey = c10::DispatchKey::TESTING_ONLY_GenericMode;

thread_local Draws* thread_draws = nullptr;

bool is_generator(const c10::Argument& argument) {
  const auto& type = argument.type();
  if (type->kind() == c10::TypeKind::GeneratorType) return true;
  const auto* optional = type->castRaw<c10::OptionalType>();
  return optional != nullptr && optional->getElementType()->kind() == c10::TypeKind::GeneratorType;
}

bool takes_generator(const c10::OperatorHandle& op) {
  const auto& arguments = op.schema().arguments();
  return std::any_of(arguments.begin(), arguments.end(), is_generator);
}

at::Device device_of(c10::ArrayRef<IValue> arguments) {
  for (const IValue& argument : arguments) {
    if (argument.isTensor() && argument.toTensor().defined()) return argument.toTensor().device();
    if (argument.isDevice()) return argument.toDevice();
  }
  return at::kCPU;
}

bool is_default(const IValue& generator, at::Device device) {
  if (generator.isNone()) return true;
  return generator.toGenerator() == at::globalContext().defaultGenerator(device);
}

void draw(const c10::OperatorHandle& op, DispatchKeySet keys, Stack* stack) {
  const auto& arguments = op.schema().arguments();
  const auto first = stack->size() - arguments.size();
  for (size_t i = 0; i < arguments.size(); ++i) {
    if (!is_generator(arguments[i])) continue;
    // Libtorch hands the key on to threads that it starts (at::launch, TorchScript's fork), whose
    // draws would come in any order.
    TORCH_CHECK(thread_draws != nullptr, "[loader] ", toString(op.operator_name()),
                " draws in a thread that a data set or transform has started by at::launch or "
                "TorchScript's fork, where its numbers would not repeat: draw them before");
    const auto device = device_of(c10::ArrayRef<IValue>(*stack).slice(first));
    IValue& given = (*stack)[first + i];
    if (is_default(given, device)) given = thread_draws->generator(device);
  }
  op.redispatchBoxed(keys & DispatchKeySet(DispatchKeySet::FULL_AFTER, kKey), stack);
}

// For good, and once a process, which takes 2 ms: 82 operators of libtorch 2.15 take a generator,
// and those of the user's that do. The others pass the key by at no cost.
void install() {
  using Libraries = std::map<std::string, torch::Library>;
  // volatile: a pointer that is never read is left out, and LeakSanitizer reports the libraries.
  static const Libraries* volatile libraries = [] {
    auto* all = new Libraries;
    const auto library = [&](const std::string& room) -> torch::Library& {
      return all->try_emplace(room, torch::Library::IMPL, room, kKey, __FILE__, __LINE__)
          .first->second;
    };
    library("_").fallback(torch::CppFunction::makeFallthrough());
    auto& dispatcher = c10::Dispatcher::singleton();
    for (const auto& name : dispatcher.getAllOpNames()) {
      const auto op = dispatcher.findSchema(name);
      if (!op || !takes_generator(*op)) continue;
      library(std::string(*name.getNamespace()))
          .impl(toString(name).c_str(), torch::CppFunction::makeFromBoxedFunction<&draw>());
    }
    return all;
  }();
  (void)libraries;
}

c10::DispatchKey installed_key() {
  install();
  return kKey;
}

}  // namespace

void draw_for_sample(int64_t index) {
  if (thread_draws != nullptr) thread_draws->for_sample(index);
}

Draws::Draws(const DrawPlace& place)
    : base_(mix(mix(mix(static_cast<uint64_t>(place.seed)) ^ static_cast<uint64_t>(place.epoch)) ^
                static_cast<uint64_t>(place.turn))),
      seed_(base_),
      outer_(thread_draws),
      key_(installed_key()) {
  thread_draws = this;
}

Draws::~Draws() { thread_draws = outer_; }

Draws* Draws::current() { return thread_draws; }

void Draws::for_sample(int64_t index) { reseed(mix(base_ ^ static_cast<uint64_t>(index))); }

void Draws::for_batch(int64_t first) { reseed(mix(mix(base_ ^ static_cast<uint64_t>(first)))); }

void Draws::reseed(uint64_t seed) {
  seed_ = seed;
  for (Own& own : own_) own.is_seeded = false;
}

at::Generator Draws::generator(at::Device device) {
  auto own = std::find_if(own_.begin(), own_.end(), [&](const Own& candidate) {
    return candidate.generator.device().type() == device.type();
  });
  if (own == own_.end()) {
    own_.push_back({device.is_cpu() ? at::detail::createCPUGenerator()
                                    : at::globalContext().defaultGenerator(device).clone(),
                    false});
    own = own_.end() - 1;
  }
  if (!own->is_seeded) {
    own->generator.set_current_seed(seed_);
    own->is_seeded = true;
  }
  return own->generator;
}

}  // namespace lockstep::data
