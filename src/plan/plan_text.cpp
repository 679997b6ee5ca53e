// A plan in words.
#include <fmt/format.h>

#include <algorithm>
#include <string>
#include <vector>

#include "lockstep/plan/plan.h"
#include "plan/words.h"

namespace lockstep::plan {
namespace {

std::string rate_text(const Plan& plan, double samples_per_second) {
  const bool tokens = plan.model.tokens > 0;
  const double rate = samples_per_second * (tokens ? static_cast<double>(plan.model.tokens) : 1);
  return count_text(rate) + (tokens ? " tokens/s" : " samples/s");
}

std::string ranks_text(int64_t ranks) {
  return ranks == 1 ? "one rank" : fmt::format("{} ranks", ranks);
}

std::string heading(const Plan& plan) {
  const auto& t = plan.training;
  const auto& device = plan.machine.device;
  std::string out = fmt::format(
      "{}: {} parameters{}; batch {} a {}{}{}, {}{}, {} bytes of optimizer state a parameter{}\n",
      plan.model.name, count_text(static_cast<double>(plan.model.elements())),
      plan.model.trained() == plan.model.elements()
          ? ""
          : fmt::format(", {} of them trained",
                        count_text(static_cast<double>(plan.model.trained()))),
      t.batch, t.lanes > 0 ? fmt::format("lane of {}", t.lanes) : "rank",
      t.accumulation > 1 ? fmt::format(" x {} micro-batches", t.accumulation) : "",
      t.evaluation_batch.value_or(0) > t.batch
          ? fmt::format(" ({} in evaluations)", *t.evaluation_batch)
          : "",
      t.precision == Precision::Narrow ? "computing in 16 bits" : "float32",
      t.recomputed == Recomputed::Blocks
          ? fmt::format(", activations recomputed{}", t.only_fsdp_recomputes ? " under Fsdp" : "")
      : t.recomputed == Recomputed::Cheap ? ", norms and activation functions recomputed"
                                          : "",
      t.state_bytes, t.average_bytes > 0 ? ", and its average" : "");
  const bool several = plan.ranks > plan.machine.devices_per_node;
  out += fmt::format("{} on {} x {}{}, {} a rank{}\n", ranks_text(plan.ranks),
                     plan.machine.devices_per_node, device.name,
                     several ? " a node, network " + plan.machine.network.name : "",
                     bytes_text(plan.strategies.front().memory.available),
                     device.shares_memory ? " (a part of the host's)" : "");
  return out;
}

std::string memory_table(const Plan& plan, int width) {
  std::vector<std::vector<std::string>> rows = {{"a rank's memory", "total", "fits", "parameters",
                                                 "gradients", "optimizer", "gathered", "in flight",
                                                 "activations", "working", "margin, libraries"}};
  for (const auto& row : plan.strategies) {
    const Memory& m = row.memory;
    rows.push_back({name_of(row.strategy), bytes_text(m.total), m.fits() ? "yes" : "no",
                    bytes_text(m.parameters), bytes_text(m.gradients), bytes_text(m.optimizer),
                    bytes_text(m.gathered), bytes_text(m.communication), bytes_text(m.activations),
                    bytes_text(m.working + m.data), bytes_text(m.margin + m.reserved)});
  }
  return table_text(rows, width);
}

std::string time_table(const Plan& plan, int width) {
  std::vector<std::vector<std::string>> rows = {{"a step's time", "total", "computes", "waits",
                                                 "slower by overlap", "stragglers", "update",
                                                 "rate"}};
  for (const auto& row : plan.strategies) {
    const StepTime& t = row.time;
    rows.push_back({name_of(row.strategy), seconds_text(t.total), seconds_text(t.computation),
                    seconds_text(t.waiting), seconds_text(t.slowdown), seconds_text(t.straggling),
                    seconds_text(t.update), rate_text(plan, row.samples_per_second)});
  }
  return table_text(rows, width);
}

std::string sizes_table(const Plan& plan, int width) {
  std::vector<std::vector<std::string>> rows = {
      {"ranks", "hosts", "best", "a rank's memory", "step", "rate", "efficiency"}};
  int64_t hosts = 1;
  const int64_t most = std::max<int64_t>({plan.ranks, 8, std::min<int64_t>(plan.knee, 1024)});
  for (const auto& row : plan.sizes) {
    if (row.ranks > most) break;
    hosts = Ranks{row.ranks, plan.machine.devices_per_node}.nodes();
    rows.push_back({std::to_string(row.ranks), std::to_string(hosts), name_of(row.strategy),
                    bytes_text(row.memory.total), seconds_text(row.time.total),
                    rate_text(plan, row.samples_per_second), percent_text(row.efficiency)});
  }
  if (rows.size() < 2) return "";
  std::string out = table_text(rows, width);
  if (hosts > 1) {
    const auto& network = plan.machine.network;
    out += wrapped(
        fmt::format("More than {} are on several hosts of {} x {}. The network between them is "
                    "taken to be {}, {:.3g} GB/s a host (--network).",
                    ranks_text(plan.machine.devices_per_node), plan.machine.devices_per_node,
                    plan.machine.device.name, network.name, network.node_bandwidth / 1e9),
        width);
  }
  return out;
}

const PlanRow* row_named(const Plan& plan, Strategy strategy) {
  for (const auto& row : plan.strategies) {
    if (row.strategy == strategy) return &row;
  }
  return nullptr;
}

std::string largest_part(const Memory& m) {
  const std::vector<std::pair<double, const char*>> parts = {
      {m.parameters + m.gathered, "parameters"},
      {m.gradients + m.communication, "gradients"},
      {m.optimizer, "the optimizer's state"},
      {m.activations + m.working, "activations"}};
  return std::ranges::max_element(parts)->second;
}

std::string hosts_text(const Plan& plan, int64_t ranks) {
  const int64_t hosts = Ranks{ranks, plan.machine.devices_per_node}.nodes();
  return hosts == 1 ? "one host" : fmt::format("{} hosts", hosts);
}

// On how many others it fits as it is.
std::string more_ranks(const Plan& plan) {
  if (plan.least_ranks == 0) return "";
  return fmt::format(" It {} from {} on ({}), by {}.",
                     plan.least_ranks > plan.ranks ? "would fit" : "fits",
                     ranks_text(plan.least_ranks), hosts_text(plan, plan.least_ranks),
                     name_of(plan.sizes.front().strategy));
}

std::string remedies_text(const Plan& plan) {
  const auto& all = plan.remedies;
  if (all.empty()) return "";
  const bool one_is_enough = all.front().memory.fits();
  const char* const between = one_is_enough ? ", or with " : ", and also with ";
  std::string out = one_is_enough ? " It would fit" : " Less is needed";
  for (const auto& one : all) {
    out += (&one == &all.front() ? " with " : between) + one.change + ": " +
           bytes_text(one.memory.total);
  }
  const Remedy& last = all.back();
  if (!one_is_enough && last.memory.fits()) out += ", which fits";
  if (!last.memory.fits() && last.least_ranks > 0 && last.least_ranks != plan.least_ranks) {
    out += fmt::format(", which would fit from {} on ({})", ranks_text(last.least_ranks),
                       hosts_text(plan, last.least_ranks));
  }
  return out + ".";
}

std::string when_nothing_fits(const Plan& plan) {
  const auto* least = &plan.strategies.front();
  for (const auto& row : plan.strategies) {
    if (row.memory.total < least->memory.total) least = &row;
  }
  const Memory& m = least->memory;
  std::string out =
      fmt::format("Nothing fits on {}: {} needs the least, {} of {}, most of it for {}.",
                  ranks_text(plan.ranks), name_of(least->strategy), bytes_text(m.total),
                  bytes_text(m.available), largest_part(m));
  out += more_ranks(plan) + remedies_text(plan);
  const char* const place = plan.machine.device.shares_memory ? "host" : "device";
  const bool is_hopeless = plan.remedies.empty() && plan.least_ranks == 0;
  return out + fmt::format(" {} a smaller model or a {} with more memory.",
                           is_hopeless ? "Take" : "Otherwise take", place);
}

std::string why_fsdp(const PlanRow& best, const PlanRow& ddp) {
  if (!ddp.memory.fits()) {
    return fmt::format(
        "Under Ddp each rank has the whole model with its gradients and optimizer state: {}, and "
        "there are {}. {} shards them: {}.",
        bytes_text(ddp.memory.total), bytes_text(ddp.memory.available), name_of(best.strategy),
        bytes_text(best.memory.total));
  }
  return fmt::format(
      "Ddp fits, too, and takes {} a step, {} more: each of its ranks updates all "
      "parameters, here each rank updates its part.",
      seconds_text(ddp.time.total), percent_text(ddp.time.total / best.time.total - 1));
}

std::string why_ddp(const Plan& plan, const PlanRow& best) {
  const PlanRow* fastest = &best;
  for (const auto& row : plan.strategies) {
    if (row.memory.fits() && row.time.total < fastest->time.total) fastest = &row;
  }
  const auto out = fmt::format("All of the model fits each rank ({} of {}), and ",
                               bytes_text(best.memory.total), bytes_text(best.memory.available));
  const double gain = best.time.total / fastest->time.total - 1;
  if (gain < 0.005) {
    return out + "no strategy that shards it is faster: it would only communicate more.";
  }
  return out + fmt::format("{}, the fastest, would gain {}, less than such an estimate is good to.",
                           name_of(fastest->strategy), percent_text(gain));
}

std::string speed_text(int64_t ranks, double speedup) {
  if (speedup >= 0.995 && speedup < 1.005) {
    return fmt::format("{} ranks are as fast as one alone: what they send takes the time they save",
                       ranks);
  }
  if (speedup >= 1) {
    const auto times =
        speedup >= 999.5 ? fmt::format("{:.0f}", speedup) : fmt::format("{:.3g}", speedup);
    return fmt::format("{} ranks are {} times as fast as one alone", ranks, times);
  }
  const auto share = percent_text(speedup);
  return fmt::format(
      "{} ranks are {} as fast as one alone: what they send takes more time than they save", ranks,
      share == "50 %" ? "half" : "only " + share);
}

std::string advice(const Plan& plan) {
  if (!plan.best) return when_nothing_fits(plan);
  const PlanRow& best = *plan.best;
  const PlanRow* ddp = row_named(plan, Strategy::Ddp);
  std::string out =
      fmt::format("Use {}: {}", name_of(best.strategy), config_of(best.strategy)) + ". ";
  if (plan.ranks == 1) {
    return out + fmt::format("The model needs {} of {}; one rank has nothing to shard or to send.",
                             bytes_text(best.memory.total), bytes_text(best.memory.available));
  }
  if (best.strategy == Strategy::Ddp) {
    out += why_ddp(plan, best);
  } else {
    out += why_fsdp(best, *ddp);
  }
  out += fmt::format(" {} of a step is computation and update; {}.",
                     percent_text((best.time.computation + best.time.update) / best.time.total),
                     speed_text(plan.ranks, best.efficiency * static_cast<double>(plan.ranks)));
  if (plan.configured && *plan.configured != best.strategy) {
    if (const auto* row = row_named(plan, *plan.configured)) {
      out += row->memory.fits() ? fmt::format(" The file asks for {}, which takes {} a step.",
                                              name_of(row->strategy), seconds_text(row->time.total))
                                : fmt::format(" The file asks for {}, which does not fit.",
                                              name_of(row->strategy));
    }
  }
  return out;
}

std::string knee_text(const Plan& plan) {
  if (plan.sizes.empty()) return "";
  if (plan.knee == 0) {
    const auto most = plan.training.lanes > 0 && plan.most_tried == plan.training.lanes
                          ? fmt::format("{}, the lanes", plan.most_tried)
                          : "131,072";
    return fmt::format(
        "Computation takes more than half of a step on any number of ranks up to {}.", most);
  }
  if (plan.knee == 1) return "";
  return fmt::format(
      "From {} on, communication and waiting take more than half of a step. More ranks still help "
      "when each has more to compute: a larger batch, or more micro-batches.",
      ranks_text(plan.knee));
}

}  // namespace

std::string plan_text(const Plan& plan, int width) {
  std::string out = wrapped(heading(plan).substr(0, heading(plan).find('\n')), width);
  out += wrapped(heading(plan).substr(heading(plan).find('\n') + 1), width) + "\n";
  out += memory_table(plan, width) + "\n" + time_table(plan, width) + "\n";
  if (const auto sizes = sizes_table(plan, width); !sizes.empty()) out += sizes + "\n";
  out += wrapped(advice(plan), width);
  if (const auto knee = knee_text(plan); !knee.empty()) out += wrapped(knee, width);
  if (plan.training.feedback != Feedback::None) {
    out += wrapped(
        fmt::format("Memory has what the hook {} keeps and works with. Times are those of plain "
                    "averages: what it saves in communication and takes to compute is not counted.",
                    name_of(plan.training.feedback)),
        width);
  }
  const bool in_files = plan.training.shards == Shards::Files;
  if (in_files || (plan.training.shards == Shards::Host && !plan.machine.device.shares_memory)) {
    out += wrapped(
        fmt::format("Under Fsdp parameters, gradients and the optimizer's state are in {}, which "
                    "memory does not count. Times are those without offloading.",
                    in_files ? "files" : "the host's memory"),
        width);
  }
  if (plan.training.encrypts && plan.ranks > plan.machine.devices_per_node) {
    out += wrapped(
        "Times are those without encryption (parallel.tls), which takes a core of each rank about "
        "1.4 ms for each MiB that the rank sends and receives.",
        width);
  }
  if (plan.machine.device.name == "cpu" && !plan.machine.is_measured) {
    out += wrapped(
        "Times are for cores as a rule has them. `lockstep bench --to machine.json` "
        "measures this machine; plan takes the file by --machine.",
        width);
  } else if (!plan.machine.is_measured && plan.training.measured_step == 0) {
    out += wrapped(
        "Computation is estimated from data sheets. --measured-step takes the seconds of "
        "a step on one rank, which makes the rest exact to a few percent (docs/plan.md).",
        width);
  }
  return out;
}

}  // namespace lockstep::plan
