#include "lockstep/plan/cost_model.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>

namespace lockstep::plan {
namespace {

// NCCL's protocols: microseconds to start, of a hop within a node and of one between nodes; the
// share of the bandwidth that is left for data.
struct Protocol {
  double start, local_hop, network_hop, overhead, share;
};
constexpr std::array kRings = {Protocol{6.6, 0.6, 2.7, 1, 0.5}, Protocol{14.0, 1.9, 4.0, 1, 0.92},
                               Protocol{8.4, 3.4, 14.0, 3, 1.0}};
constexpr Protocol kTree = {8.4, 4.0, 14.0, 0, 0.92};
constexpr double kMicro = 1e-6;

double bandwidth_of(const Machine& machine, const Ranks& ranks) {
  const double local = machine.device.local_bandwidth;
  return ranks.nodes() == 1 ? local : std::min(local, machine.network.node_bandwidth);
}

// `rounds` times around the ring: 1 gathers or scatters, 2 reduce for all.
double ring(const Machine& machine, const Ranks& ranks, double bytes, int rounds) {
  const auto n = static_cast<double>(ranks.count);
  const auto nodes = static_cast<double>(ranks.nodes());
  const double hops = rounds * (n - 1), far = rounds * (nodes - 1);
  const double moved = rounds * bytes * (n - 1) / n / bandwidth_of(machine, ranks);
  double best = std::numeric_limits<double>::infinity();
  for (const auto& p : kRings) {
    const double near_hop = nodes > 1 ? std::max(p.local_hop, p.overhead) : p.local_hop;
    const double latency = kMicro * (p.start + (hops - far) * near_hop + far * p.network_hop) +
                           far * machine.network.hop_seconds;
    best = std::min(best, latency + moved / p.share);
  }
  return best;
}

double tree(const Machine& machine, const Ranks& ranks, double bytes) {
  const auto nodes = static_cast<double>(ranks.nodes());
  const double far = std::log2(nodes);
  const double latency =
      kMicro *
          (kTree.start +
           2 * ((static_cast<double>(std::min(ranks.count, ranks.per_node)) - 1) * kTree.local_hop +
                far * kTree.network_hop)) +
      2 * far * machine.network.hop_seconds;
  return latency + 2 * bytes / (kTree.share * bandwidth_of(machine, ranks));
}

// Between two measured sizes the time is a line, and below the first it stays. Beyond the last it
// continues as from the next smaller one that took less time: a measurement may be noisy, and more
// bytes never take less time than the largest measured.
double measured(const std::vector<MeasuredCollective>& all, double bytes) {
  if (bytes <= all.front().bytes || all.size() == 1) {
    return all.front().seconds * std::max(1.0, bytes / all.front().bytes);
  }
  size_t i = 1;
  while (i + 1 < all.size() && all[i].bytes < bytes) ++i;
  const auto& b = all[i];
  if (bytes > b.bytes) {
    while (i > 1 && all[i - 1].seconds >= b.seconds) --i;
  }
  const auto& a = all[i - 1];
  const double slope = (b.seconds - a.seconds) / (b.bytes - a.bytes);
  return b.seconds + (bytes > b.bytes ? std::max(0.0, slope) : slope) * (bytes - b.bytes);
}

// Both halves of an all_reduce move the same bytes. `own`: what was measured of this half.
double gather_or_scatter(const Machine& machine, const Ranks& ranks, double bytes,
                         const std::vector<MeasuredCollective>& own) {
  if (ranks.count <= 1 || bytes <= 0) return 0;
  if (ranks.nodes() == 1 && !own.empty()) return measured(own, bytes);
  if (ranks.nodes() == 1 && !machine.all_reduce.empty()) {
    return measured(machine.all_reduce, bytes) / 2;
  }
  return ring(machine, ranks, bytes, 1);
}

}  // namespace

double all_gather_seconds(const Machine& machine, const Ranks& ranks, double bytes) {
  return gather_or_scatter(machine, ranks, bytes, machine.all_gather);
}

double reduce_scatter_seconds(const Machine& machine, const Ranks& ranks, double bytes) {
  return gather_or_scatter(machine, ranks, bytes, machine.reduce_scatter);
}

double all_reduce_seconds(const Machine& machine, const Ranks& ranks, double bytes) {
  if (ranks.count <= 1 || bytes <= 0) return 0;
  if (ranks.nodes() == 1 && !machine.all_reduce.empty()) {
    return measured(machine.all_reduce, bytes);
  }
  return std::min(ring(machine, ranks, bytes, 2), tree(machine, ranks, bytes));
}

StepTime step_time(const StepWork& work) {
  StepTime out;
  const double room = std::min(work.overlappable, work.computation);
  const double last_room = std::min(work.last_overlappable, room);
  const double hidden = std::min(work.last_collectives, last_room) +
                        std::min(work.collectives - work.last_collectives, room - last_room);
  out.computation = work.computation;
  out.slowdown = kSlowdownOfOverlap * hidden;
  out.waiting = work.collectives - hidden + work.exposed;
  out.straggling = kStragglingPerDoubling * work.computation *
                   std::log2(std::max<double>(1.0, static_cast<double>(work.nodes)));
  out.update = work.update;
  out.total = out.computation + out.slowdown + out.straggling + out.waiting + out.update;
  return out;
}

double computation_of(const StepWork& work, double seconds) {
  const double share = work.computation > 0 ? work.overlappable / work.computation : 1;
  const double last_share = work.computation > 0 ? work.last_overlappable / work.computation : 0;
  double low = 0, high = seconds;
  for (int i = 0; i < 60; ++i) {  // the total grows with computation
    StepWork tried = work;
    tried.computation = (low + high) / 2;
    tried.overlappable = share * tried.computation;
    tried.last_overlappable = last_share * tried.computation;
    (step_time(tried).total < seconds ? low : high) = tried.computation;
  }
  return low;
}

}  // namespace lockstep::plan
