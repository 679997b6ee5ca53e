#include "lockstep/parallel/metrics.h"

#include <ATen/ATen.h>
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <functional>
#include <numeric>
#include <string>

#include "comm/transport.h"
#include "lockstep/core/error.h"
#include "parallel/lanes/rules.h"
#include "parallel/layout/flat_memory.h"

namespace lockstep::parallel {
namespace {

bool agreed(bool here, ReduceOp op, const Group& group) {
  if (group.size() == 1) return here;
  at::Tensor flag = at::full({1}, here ? 1 : 0, at::kInt);
  group.all_reduce(flag, op, {.label = "any_rank"}).wait();
  return flag.item<int>() != 0;
}

// A description of a rank's rows without their number, for comparison and for the message.
std::string kind_of(const at::Tensor& rows) {
  if (!rows.defined() || rows.dim() == 0) return "no rows";
  return fmt::format("{} rows of [{}]", comm::name_of(rows.scalar_type()),
                     fmt::join(rows.sizes().slice(1), ", "));
}

// By rank. Throws on all ranks when their rows are not of one kind.
std::vector<int64_t> counts_of(const at::Tensor& rows, const Group& group) {
  group.refuse_python_ranks("gather_for_metrics");
  const bool has_rows = rows.defined() && rows.dim() > 0;
  const auto all =
      group.all_gather_bytes(fmt::format("{}:{}", has_rows ? rows.size(0) : 0, kind_of(rows)),
                             {.label = "gather_for_metrics"});
  std::vector<int64_t> counts;
  for (int rank = 0; rank < group.size(); ++rank) {
    const std::string kind = all[rank].substr(all[rank].find(':') + 1);
    const std::string first = all[0].substr(all[0].find(':') + 1);
    if (kind != first || kind == "no rows") {
      throw ConfigError(
          fmt::format("[gather_for_metrics] rank {} has {}, and rank 0 {}: give a tensor with one "
                      "row a sample, "
                      "the same on all ranks but for the number of rows",
                      rank, kind, first));
    }
    counts.push_back(std::stoll(all[rank]));
  }
  return counts;
}

}  // namespace

at::Tensor sum_over_ranks(const at::Tensor& value, const Group& group) {
  at::Tensor sum = value.detach().clone(at::MemoryFormat::Contiguous);
  if (group.size() == 1) return sum;
  group.all_reduce(as_reals(sum), ReduceOp::Sum, {.label = "sum_over_ranks"}).wait();
  return sum;
}

double sum_over_ranks(double value, const Group& group) {
  return sum_over_ranks(at::full({1}, value, at::kDouble), group).item<double>();
}

at::Tensor gather_for_metrics(const at::Tensor& rows, const Group& group,
                              const GatherOptions& options) {
  const auto counts = counts_of(rows, group);
  const int64_t ranks = group.size();
  const int64_t most = std::ranges::max(counts),
                total = std::accumulate(counts.begin(), counts.end(), int64_t{0});
  // Samples are dealt out in turn: the first ranks may have one more.
  if (!std::ranges::is_sorted(counts, std::greater()) || most - counts.back() > 1) {
    throw ConfigError(
        fmt::format("[gather_for_metrics] the ranks have {} rows, by rank, which is not how a "
                    "sampler deals out "
                    "samples: gather each batch, or the batches of a whole epoch",
                    fmt::join(counts, ", ")));
  }
  const int64_t wanted = options.samples.value_or(total);
  if (wanted < 0 || wanted > total) {
    throw ConfigError(fmt::format(
        "[gather_for_metrics] samples = {}, but the ranks have {} rows together", wanted, total));
  }
  const at::Tensor mine = rows.detach().contiguous();
  if (ranks == 1) return mine.narrow(0, 0, wanted).clone();
  auto sizes = mine.sizes().vec();
  std::vector<at::Tensor> parts;
  for (const int64_t count : counts) {
    sizes[0] = count;
    parts.push_back(at::empty(sizes, mine.options()));
  }
  std::vector<at::Tensor> outputs;
  for (const auto& part : parts) outputs.push_back(as_reals(part));
  group.all_gather(outputs, as_reals(mine), {.label = "gather_for_metrics"}).wait();
  sizes[0] = total;
  at::Tensor all = at::empty(sizes, mine.options());
  for (int64_t rank = 0; rank < ranks; ++rank) {
    if (counts[rank] > 0) all.slice(0, rank, std::nullopt, ranks).copy_(parts[rank]);
  }
  return all.narrow(0, 0, wanted);
}

bool any_rank(bool here, const Group& group) { return agreed(here, ReduceOp::Max, group); }
bool every_rank(bool here, const Group& group) { return agreed(here, ReduceOp::Min, group); }

at::Tensor global_loss(const at::Tensor& loss, const Group& group) {
  if (loss.numel() != 1) {
    throw ConfigError(
        fmt::format("[global_loss] a loss of {} elements: it must have one", loss.numel()));
  }
  refuse_lanes(group, "global_loss", "use LaneMean");
  at::Tensor mean = loss.detach().clone();
  // A count of errors, say: its mean is none.
  if (at::isIntegralType(mean.scalar_type(), /*includeBool=*/true)) mean = mean.to(at::kDouble);
  if (group.size() > 1) group.all_reduce(mean, ReduceOp::Average, {.label = "global_loss"}).wait();
  return mean;
}

}  // namespace lockstep::parallel
