// What each strategy keeps.
#include <algorithm>
#include <numeric>
#include <vector>

#include "lockstep/plan/strategy.h"
#include "plan/activation_peak.h"
#include "plan/sharding.h"

namespace lockstep::plan {
namespace {

constexpr double kFloat = 4;

bool is_fsdp(Strategy strategy) { return strategy != Strategy::Ddp && strategy != Strategy::Zero; }

// Units as Fsdp has them: the blocks, and one for all the rest, the root. A model without blocks is
// one unit.
struct Sizes {
  double all = 0, root = 0, largest = 0;  // elements
};

Sizes sizes_of(const ModelProfile& model) {
  Sizes out;
  for (const auto& unit : model.units) {
    const auto elements = static_cast<double>(unit.elements());
    out.all += elements;
    if (unit.is_block) {
      out.largest = std::max(out.largest, elements);
    } else {
      out.root += elements;
    }
  }
  return out;
}

void add_activations(Memory& out, const ModelProfile& model, const Training& training) {
  const auto peak = activation_peak(model, training.batch, training.recomputed);
  out.activations = peak.kept;
  out.working = peak.working;
  out.data = model.sample_bytes * static_cast<double>(training.batch) *
             static_cast<double>(1 + training.prefetched);
}

// Beside what is kept at the end, when forward works in pieces: their results are added up in what
// is kept for all batches, which is not there yet while the first piece is worked on.
double pieces_of(const ProfileUnit& unit, double batch) {
  const double all = unit.chunked * batch, one = std::min(all, unit.piece);
  return all > unit.piece ? std::max(2 * one, one + unit.fixed_kept)
                          : std::max(one, 2 * one - unit.fixed_kept);
}

}  // namespace

ActivationPeak activation_peak(const ModelProfile& model, int64_t samples, Recomputed recomputed) {
  const auto batch = static_cast<double>(samples);
  const auto kept_of = [&](const ProfileUnit& unit) {
    if (recomputed == Recomputed::Blocks && unit.is_block) return unit.input * batch;
    const double cheap = recomputed == Recomputed::Cheap ? unit.cheap : 0;
    return (unit.kept - cheap) * batch + unit.fixed_kept;
  };
  ActivationPeak out;
  for (const auto& unit : model.units) out.kept += kept_of(unit);
  double alive = out.kept, most = out.kept;
  for (auto unit = model.units.rbegin(); unit != model.units.rend(); ++unit) {
    // A block that is computed again has all that it would have kept; a norm has less than what
    // the block needs anyway at its busiest.
    const double again = recomputed == Recomputed::Blocks
                             ? unit->kept * batch + unit->fixed_kept - kept_of(*unit)
                             : 0;
    const double working = unit->transient * batch + unit->fixed_transient;
    most = std::max(most, alive + again + std::max(working, pieces_of(*unit, batch)));
    alive -= kept_of(*unit);
  }
  out.working = most - out.kept;
  return out;
}

int64_t shard_ranks(Strategy strategy, const Machine& machine, int64_t ranks) {
  return strategy == Strategy::FsdpHybrid ? std::min(ranks, machine.devices_per_node) : ranks;
}

Memory memory_of(const ModelProfile& model, const Training& training, Strategy strategy,
                 const Machine& machine, int64_t ranks) {
  const Sizes sizes = sizes_of(model);
  const bool narrow = training.precision == Precision::Narrow;
  const double computed = narrow ? 2 : kFloat;
  const auto divided = static_cast<double>(shard_ranks(strategy, machine, ranks));
  const bool on_one_host = machine.device.shares_memory && ranks <= machine.devices_per_node;
  Memory out;
  out.gradients = kFloat * sizes.all;
  out.optimizer = static_cast<double>(training.state_bytes) * sizes.all;
  out.parameters = kFloat * sizes.all;
  // Autocast keeps a narrow copy of each weight from its first use to the end of the pass.
  const double narrow_copies = narrow && model.narrow_copies ? 2 * sizes.all : 0;
  if (strategy == Strategy::Zero) out.optimizer /= static_cast<double>(ranks);
  if (!is_fsdp(strategy)) {
    out.parameters += narrow_copies;
    if (training.sent_bytes < 4) {
      out.communication = static_cast<double>(training.sent_bytes) * sizes.all;
    }
  } else {
    out.parameters /= divided;
    out.gradients /= divided;
    out.optimizer /= divided;
    // In one memory the parameters of all ranks are there once. Elsewhere a unit in use and the
    // next two are whole, beside the root; with SHARD_GRAD_OP all stay until their backward.
    if (on_one_host) {
      out.gathered = narrow ? 2 * sizes.all / divided : 0;
    } else if (strategy == Strategy::FsdpGradients || divided == 1) {
      out.gathered = computed * sizes.all;
    } else {
      out.gathered = computed * std::min(sizes.all, sizes.root + 3 * sizes.largest);
    }
    // Two units' gradients at a time and the root's; accumulation without communication holds all.
    const double reduced = training.accumulation > 1 ? sizes.all : sizes.root + 2 * sizes.largest;
    out.communication = computed * std::max(reduced, sizes.root + 2 * sizes.largest);
  }
  out.parameters += kFloat * static_cast<double>(model.buffer_elements);
  add_activations(out, model, training);
  out.tensors = out.parameters + out.gradients + out.optimizer + out.gathered + out.communication +
                out.activations + out.working + out.data;
  const Device& device = machine.device;
  out.margin = device.allocator_margin * out.tensors;
  out.reserved = device.reserved_bytes;
  out.total = out.tensors + out.margin + out.reserved;
  out.available = device.memory_bytes;
  if (device.shares_memory) {
    out.available /= static_cast<double>(std::min(ranks, machine.devices_per_node));
  }
  return out;
}

}  // namespace lockstep::plan
