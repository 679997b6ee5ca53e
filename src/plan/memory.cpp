// What each strategy keeps.
#include <algorithm>
#include <vector>

#include "lockstep/plan/strategy.h"
#include "plan/activation_peak.h"
#include "plan/sharding.h"
#include "plan/sizes.h"

namespace lockstep::plan {
namespace {

// Units as Fsdp has them: the blocks, and one for all the rest, the root. A model without blocks is
// one unit.
struct Sizes {
  double all = 0, root = 0, largest = 0;  // elements
  std::vector<double> blocks;
};

Sizes sizes_of(const ModelProfile& model, int64_t (ProfileUnit::*count)() const) {
  Sizes out;
  for (const auto& unit : model.units) {
    const auto elements = static_cast<double>((unit.*count)());
    out.all += elements;
    if (unit.is_block) {
      out.largest = std::max(out.largest, elements);
      out.blocks.push_back(elements);
    } else {
      out.root += elements;
    }
  }
  return out;
}

// Autocast keeps a narrow copy of each weight from its first use to the end of the pass; of a
// frozen one only what backward computes the gradients of inputs by.
double elements_with_backward(const ModelProfile& model) {
  double sum = 0;
  for (const auto& unit : model.units) {
    if (unit.has_backward) sum += static_cast<double>(unit.elements());
  }
  return sum;
}

// Where ranks of one host exchange tensors in memory that they share, it comes in whole pages.
enum class Exchange { Private, Shared };
double exchanged(double bytes, Exchange exchange) {
  return exchange == Exchange::Shared ? shared_memory_bytes(bytes) : bytes;
}

// Ddp's gradients lie in its buckets.
double gradients_in_buckets(const ModelProfile& model, const Training& training,
                            Exchange exchange) {
  double sum = 0;
  for (const auto& bucket : bucket_sizes(model, training)) sum += exchanged(bucket.bytes, exchange);
  return sum;
}

// Of all ranks together, where they have one copy: a memory for each unit.
double shared_parameters(const Sizes& sizes, double width) {
  double sum = shared_memory_bytes(width * sizes.root);
  for (const double block : sizes.blocks) sum += shared_memory_bytes(width * block);
  return sum;
}

// Units' gradients while they are added up over ranks: the root's, and those of two other units at
// a time. Accumulation without communication holds all, the others in memory of the rank's own.
double gradients_in_flight(const Sizes& sizes, const Training& training, double width,
                           Exchange exchange, int64_t ranks) {
  const double lent = exchanged(width * sizes.root, exchange) +
                      (sizes.blocks.empty() ? 0 : 2 * exchanged(width * sizes.largest, exchange));
  const double rest = width * (sizes.all - sizes.root - 2 * sizes.largest);
  if (training.lanes == 0) {
    return lent + (training.accumulation > 1 ? std::max(0.0, rest) : 0);
  }
  // Whole sums of lanes until the rank's last one, of which the first is exchanged.
  const auto more = static_cast<double>(lane_slots(training, ranks) - 1);
  double slots = exchanged(width * sizes.root, exchange) + more * width * sizes.all;
  for (const double block : sizes.blocks) slots += exchanged(width * block, exchange);
  return lent + slots;
}

void add_activations(Memory& out, const ModelProfile& model, const Training& training,
                     const ActivationPeak& peak) {
  out.activations = peak.kept;
  out.working = peak.working;
  out.data = model.sample_bytes * static_cast<double>(training.batch) *
             static_cast<double>(1 + training.prefetched);
}

// What a hook with error feedback works with at its busiest, beside the residuals that it has
// (src/parallel/hooks).
double feedback_peak(const ModelProfile& model, const Training& training, const Device& device) {
  // On a CPU the largest elements are found among pairs of a value and its place.
  const double chosen = 1 + (device.shares_memory ? (kIndex + kIndex) / kFloat : 0);
  double next = 0, most = 0, largest = 0;
  for (const auto& bucket : bucket_sizes(model, training)) {
    // Of top_k: absolute values with those pairs, of one gradient at a time; then what is sent of
    // the bucket and its next residuals, which stay until the pass has ended.
    most = std::max({most, next + chosen * bucket.largest, next + 2 * bucket.bytes});
    next += bucket.bytes;
    largest = std::max(largest, bucket.largest);
  }
  // Of power_sgd: all gradients with their residuals, which become the next ones, and one product.
  return training.feedback == Feedback::TopK ? most : next + largest;
}

// The most that a forward pass of an evaluation holds, which keeps nothing for a backward pass: the
// input and the result of a unit, as large as their gradients, and the batches of its loader.
double evaluation_peak(const ModelProfile& model, const Training& training) {
  if (!training.evaluation_batch) return 0;
  const int64_t samples =
      *training.evaluation_batch > 0 ? *training.evaluation_batch : training.batch;
  const auto batch = static_cast<double>(samples);
  double most = 0;
  for (const auto& unit : model.units) {
    const double piece = std::min(unit.chunked * batch, unit.piece);
    most = std::max({most, unit.transient * batch, 2 * piece});
  }
  return most + model.sample_bytes * batch * static_cast<double>(1 + training.prefetched);
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
    if (!unit.has_backward) return 0.0;
    if (recomputed == Recomputed::Blocks && unit.is_block) return unit.input * batch;
    const double cheap = recomputed == Recomputed::Cheap ? unit.cheap : 0;
    return (unit.kept - cheap) * batch + unit.fixed_kept;
  };
  ActivationPeak out;
  for (const auto& unit : model.units) out.kept += kept_of(unit);
  double alive = out.kept, most = out.kept, gradients = 0, growing = out.kept;
  for (auto unit = model.units.rbegin(); unit != model.units.rend(); ++unit) {
    // A block that is computed again has all that it would have kept; a norm has less than what
    // the block needs anyway at its busiest.
    const double again = recomputed == Recomputed::Blocks && unit->has_backward
                             ? unit->kept * batch + unit->fixed_kept - kept_of(*unit)
                             : 0;
    const double working = unit->transient * batch + unit->fixed_transient;
    const double busiest = alive + again + std::max(working, pieces_of(*unit, batch));
    most = std::max(most, busiest);
    growing = std::max(growing, busiest + gradients);
    alive -= kept_of(*unit);
    gradients += kFloat * static_cast<double>(unit->trained());
    growing = std::max(growing, alive + gradients);
  }
  out.working = most - out.kept;
  out.growing_gradients = growing - most;
  return out;
}

Memory memory_of(const ModelProfile& model, const Training& training, Strategy strategy,
                 const Machine& machine, int64_t ranks) {
  const Sizes sizes = sizes_of(model, &ProfileUnit::elements);
  const Sizes trained = sizes_of(model, &ProfileUnit::trained);
  const bool narrow = training.precision == Precision::Narrow;
  const double computed = narrow ? 2 : kFloat;
  const auto divided = static_cast<double>(shard_ranks(strategy, machine, ranks));
  const bool on_one_host = machine.device.shares_memory && ranks <= machine.devices_per_node;
  const Exchange exchange = on_one_host && ranks > 1 ? Exchange::Shared : Exchange::Private;
  const bool in_files = training.shards == Shards::Files;
  const bool is_offloaded =
      in_files || (training.shards == Shards::Host && !machine.device.shares_memory);
  const auto peak = activation_peak(model, training.batch, under(training, strategy).recomputed);
  Memory out;
  double last_gradients = 0;  // that an evaluation finds beside those of the busiest moment
  out.gradients = kFloat * trained.all;
  out.optimizer = static_cast<double>(training.state_bytes) * trained.all;
  out.parameters = kFloat * sizes.all;
  const double narrow_copies =
      narrow && model.narrow_copies ? 2 * elements_with_backward(model) : 0;
  if (strategy == Strategy::Zero) {
    out.optimizer /= static_cast<double>(ranks);
    out.parameters = exchanged(out.parameters, exchange);
  }
  out.optimizer += static_cast<double>(training.average_bytes) * sizes.all;
  if (!is_fsdp(strategy)) {
    out.parameters += narrow_copies;
    // One rank has no buckets: gradients come to be while activations go. Of accumulated ones the
    // first micro-batch leaves all.
    if (ranks > 1) {
      out.gradients = gradients_in_buckets(model, training, exchange);
    } else if (training.accumulation == 1 && training.lanes == 0) {
      out.gradients = peak.growing_gradients;
      last_gradients = kFloat * trained.all - out.gradients;
    }
    if (training.lanes > 0) {  // further sums beside those in the buckets
      out.communication +=
          static_cast<double>(lane_slots(training, ranks) - 1) * kFloat * trained.all;
    }
    if (training.sent_bytes < 4) {
      out.communication = static_cast<double>(training.sent_bytes) * trained.all;
    }
  } else {
    out.parameters /= divided;
    out.gradients /= divided;
    out.optimizer /= divided;
    // In one memory the parameters of all ranks are there once. Elsewhere a unit in use and the
    // next two are whole, beside the root; with SHARD_GRAD_OP all stay until their backward.
    if (exchange == Exchange::Shared && !in_files) {
      const double shared = shared_parameters(sizes, computed) / divided;
      (narrow ? out.gathered : out.parameters) = shared;
    } else if (on_one_host && !in_files) {
      out.gathered = narrow ? 2 * sizes.all / divided : 0;
    } else if (keeps_parameters(strategy) || divided == 1) {
      out.gathered = computed * sizes.all;
    } else {
      out.gathered = computed * std::min(sizes.all, sizes.root + 3 * sizes.largest);
    }
    out.communication = gradients_in_flight(trained, training, computed, exchange, ranks);
    if (is_offloaded) out.parameters = out.gradients = out.optimizer = 0;
  }
  out.parameters += kFloat * static_cast<double>(model.buffer_elements);
  add_activations(out, model, training, peak);
  if (training.feedback != Feedback::None && !is_fsdp(strategy)) {
    out.communication += kFloat * trained.all;
    // power_sgd computes when backward has ended.
    const double gone = training.feedback == Feedback::PowerSgd ? out.activations : 0;
    out.working = std::max(out.working, feedback_peak(model, training, machine.device) - gone);
  }
  if (const double evaluated = evaluation_peak(model, training); evaluated > 0) {
    out.working = std::max(out.working, evaluated + last_gradients - out.activations);
  }
  if (machine.device.shares_memory) out.data += training.dataset_bytes;
  out.tensors = out.parameters + out.gradients + out.optimizer + out.gathered + out.communication +
                out.activations + out.working + out.data;
  const Device& device = machine.device;
  out.margin = device.allocator_margin * out.tensors;
  out.reserved = device.reserved_bytes + (model.convolves ? device.convolution_bytes : 0) +
                 (model.attends ? device.attention_bytes : 0);
  out.total = out.tensors + out.margin + out.reserved;
  out.available = device.memory_bytes;
  if (device.shares_memory) {
    out.available /= static_cast<double>(std::min(ranks, machine.devices_per_node));
  }
  return out;
}

}  // namespace lockstep::plan
