#include "lockstep/plan/measure.h"

#include <ATen/ops/zeros_like.h>
#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <unordered_set>

#include "lockstep/core/error.h"
#include "lockstep/parallel/call.h"
#include "plan/measure/allocations.h"
#include "plan/measure/flops.h"

namespace lockstep::plan {
namespace {

using Clock = std::chrono::steady_clock;
using Modules = std::vector<std::shared_ptr<torch::nn::Module>>;

// What one unit did in a pass.
struct UnitPass {
  int64_t calls = 0;
  bool has_backward = false;                // of any call
  double before = 0;                        // alive when it was called first
  double kept = 0, results = 0, flops = 0;  // of all its calls
  double working = 0;                       // beside what is kept, the most of forward and backward
};

struct Pass {
  MeasuredPass whole;
  std::vector<UnitPass> units;
};

double bytes_of(const std::vector<at::Tensor>& tensors) {
  double sum = 0;
  for (const auto& tensor : tensors) {
    if (tensor.defined()) sum += static_cast<double>(tensor.nbytes());
  }
  return sum;
}

// Takes part in the calls of a unit: how much memory there is before and after.
class Probe : public parallel::CallLayer {
 public:
  Probe(const torch::nn::Module& unit, UnitPass& pass, Allocations& memory,
        const FlopCounter& flops, Probe*& working)
      : pass_(pass),
        memory_(memory),
        flops_(flops),
        working_(working),
        attached_(unit, *this, parallel::CallDepth::Shard) {}

  Tensors call(const Tensors& inputs, const Body& body) override {
    const double before = memory_.now(), flops = flops_.count();
    memory_.begin_window();
    Tensors results = body(inputs);
    const double after = memory_.now();
    if (pass_.calls++ == 0) pass_.before = before;
    pass_.kept += after - before;
    pass_.results += bytes_of(results);
    pass_.flops += flops_.count() - flops;
    pass_.working = std::max(pass_.working, memory_.window_peak() - after);
    // Backward of the unit lasts from its results' gradients to its inputs', or to those of the
    // results of the unit before, which may be the same tensors.
    for (const auto& result : results) {
      if (!result.defined() || !result.requires_grad()) continue;
      pass_.has_backward = true;
      result.register_hook([this](const at::Tensor& gradient) {
        if (working_ != nullptr) working_->finish();
        working_ = this;
        level_ = memory_.now() - static_cast<double>(gradient.nbytes());
        memory_.begin_window();
      });
    }
    for (const auto& input : inputs) {
      if (!input.defined() || !input.requires_grad()) continue;
      input.register_hook([this](const at::Tensor&) {
        if (working_ == this) finish();
      });
    }
    return results;
  }

  // Of its backward.
  void finish() {
    pass_.working = std::max(pass_.working, memory_.window_peak() - level_);
    working_ = nullptr;
  }

 private:
  UnitPass& pass_;
  Allocations& memory_;
  const FlopCounter& flops_;
  Probe*& working_;  // the one whose backward is under way, if any
  double level_ = 0;
  parallel::CallAttachment attached_;
};

void drop_gradients(torch::nn::Module& module) {
  for (auto& parameter : module.parameters()) parameter.mutable_grad() = at::Tensor();
}

// Memory and arithmetic.
Pass run(torch::nn::Module& module, const std::function<at::Tensor()>& loss, const Modules& units) {
  for (auto& parameter : module.parameters()) {
    if (parameter.requires_grad()) parameter.mutable_grad() = at::zeros_like(parameter);
  }
  Pass out;
  out.units.resize(units.size());
  const auto memory = std::make_shared<Allocations>();
  {
    const FlopCounter flops;
    Probe* working = nullptr;
    std::vector<std::unique_ptr<Probe>> probes;
    for (size_t i = 0; i < units.size(); ++i) {
      probes.push_back(std::make_unique<Probe>(*units[i], out.units[i], *memory, flops, working));
    }
    const Allocations::Watch watch(memory);
    at::Tensor value = loss();
    out.whole.flops = flops.count();
    out.whole.kept = memory->now();
    value.backward();
    if (working != nullptr) working->finish();  // whose inputs have no gradients
  }
  out.whole.peak = memory->peak();
  drop_gradients(module);
  return out;
}

double median_seconds(torch::nn::Module& module, const std::function<at::Tensor()>& loss,
                      int timed) {
  std::vector<double> seconds;
  for (int i = 0; i < timed; ++i) {
    const auto begin = Clock::now();
    loss().backward();
    seconds.push_back(std::chrono::duration<double>(Clock::now() - begin).count());
  }
  drop_gradients(module);
  if (seconds.empty()) return 0;
  const auto middle = seconds.begin() + static_cast<std::ptrdiff_t>(seconds.size() / 2);
  std::ranges::nth_element(seconds, middle);
  return *middle;
}

void check_units(torch::nn::Module& module, const Modules& units) {
  const auto inside = module.modules(/*include_self=*/false);
  for (const auto& unit : units) {
    if (std::ranges::find(inside, unit) == inside.end()) {
      throw ConfigError("[plan] measure: a unit is not one of the module's modules");
    }
    for (const auto& within : unit->modules(/*include_self=*/false)) {
      if (std::ranges::find(units, within) != units.end()) {
        throw ConfigError(
            fmt::format("[plan] measure: unit {} is within unit {}, and units are measured side by "
                        "side: leave one of them out",
                        within->name(), unit->name()));
      }
    }
  }
}

// A quantity in two runs, of `batch` samples and of twice as many, as a line.
struct Line {
  double fixed, each;

  Line(double one, double two, int64_t batch) {
    each = std::max(0.0, two - one) / static_cast<double>(batch);
    fixed = std::max(0.0, one - each * static_cast<double>(batch));
  }
};

}  // namespace

MeasuredPass measure_pass(torch::nn::Module& module, const std::function<at::Tensor()>& loss,
                          int timed) {
  MeasuredPass out = run(module, loss, {}).whole;
  out.seconds = median_seconds(module, loss, timed);
  return out;
}

ModelProfile measure(torch::nn::Module& module, const std::function<at::Tensor(int64_t)>& loss,
                     const MeasureOptions& options) {
  if (options.batch < 1) throw ConfigError("[plan] measure: a batch below 1");
  check_units(module, options.units);
  const auto pass = [&](int64_t batch) {
    return run(
        module, [&] { return loss(batch); }, options.units);
  };
  pass(options.batch);  // libraries take memory at first
  const Pass one = pass(options.batch), two = pass(2 * options.batch);

  ModelProfile profile{
      .name = module.name(), .tokens = options.tokens, .sample_bytes = options.sample_bytes};
  for (const auto& buffer : module.buffers()) profile.buffer_elements += buffer.numel();
  std::unordered_set<const void*> taken;
  const auto take = [&](const torch::nn::Module& of) {
    ProfileUnit unit{.name = of.name()};
    for (const auto& parameter : of.parameters()) {
      if (!taken.insert(parameter.unsafeGetTensorImpl()).second) continue;
      if (parameter.requires_grad()) {
        unit.parameters.push_back(parameter.numel());
      } else {
        unit.frozen += parameter.numel();
      }
    }
    return unit;
  };
  const auto samples = static_cast<double>(options.batch);
  // What stays of a pass without a backward is the input of what has one.
  const auto kept_by = [&](const UnitPass& unit, double bytes) {
    return unit.has_backward ? bytes : 0;
  };
  // What was kept before the first unit is freed after the last one's backward.
  double lead_fixed = 0, lead_each = 0;
  if (!options.units.empty()) {
    const UnitPass &a = one.units[0], &b = two.units[0];
    const Line lead(kept_by(a, a.before), kept_by(b, b.before), options.batch);
    profile.units.push_back(
        {.name = "before the units", .kept = lead.each, .fixed_kept = lead.fixed});
    lead_fixed = lead.fixed;
    lead_each = lead.each;
  }
  double unit_fixed = lead_fixed, unit_each = lead_each, unit_flops = 0;
  for (size_t i = 0; i < options.units.size(); ++i) {
    const UnitPass &a = one.units[i], &b = two.units[i];
    if (a.calls == 0) {
      throw ConfigError(
          fmt::format("[plan] measure: unit {} is not called through lockstep::call()",
                      options.units[i]->name()));
    }
    ProfileUnit unit = take(*options.units[i]);
    const Line kept(kept_by(a, a.kept), kept_by(b, b.kept), options.batch);
    const Line working(a.working, b.working, options.batch);
    unit.kept = kept.each;
    unit.fixed_kept = kept.fixed;
    unit.transient = working.each;
    unit.fixed_transient = working.fixed;
    // Its results are the next one's input, which is kept when that is recomputed.
    unit.input = Line(a.results, b.results, options.batch).each;
    if (i > 0 && a.has_backward && !one.units[i - 1].has_backward) {  // and its own, as the first
      unit.input += Line(one.units[i - 1].results, two.units[i - 1].results, options.batch).each;
    }
    unit.flops = a.flops / samples;
    unit.is_block = true;
    unit.has_backward = a.has_backward;
    unit_fixed += kept.fixed;
    unit_each += kept.each;
    unit_flops += a.flops;
    profile.units.push_back(std::move(unit));
  }
  ProfileUnit rest = take(module);
  const Line kept(one.whole.kept, two.whole.kept, options.batch);
  const Line peak(one.whole.peak, two.whole.peak, options.batch);
  rest.name = options.units.empty() ? module.name() : "the rest";
  rest.kept = std::max(0.0, kept.each - unit_each);
  rest.fixed_kept = std::max(0.0, kept.fixed - unit_fixed);
  rest.transient = std::max(0.0, peak.each - kept.each);
  rest.fixed_transient = std::max(0.0, peak.fixed - kept.fixed);
  rest.flops = std::max(0.0, one.whole.flops - unit_flops) / samples;
  profile.units.push_back(std::move(rest));
  return profile;
}

}  // namespace lockstep::plan
