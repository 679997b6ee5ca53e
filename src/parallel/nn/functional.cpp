#include "lockstep/parallel/functional.h"

#include <ATen/ATen.h>
#include <fmt/format.h>
#include <fmt/ranges.h>
#include <torch/csrc/autograd/graph_task.h>

#include <algorithm>
#include <numeric>
#include <string_view>

#include "comm/transport.h"
#include "lockstep/core/error.h"
#include "parallel/lanes/rules.h"
#include "parallel/nn/held_group.h"

namespace lockstep::functional {
namespace {

using parallel::held_group;
using parallel::hold_group;
using torch::autograd::AutogradContext;
using torch::autograd::variable_list;
using Counts = std::vector<int64_t>;

comm::CallOptions call_of(std::string_view label) {
  const bool is_backward = torch::autograd::get_current_graph_task_id() != -1;
  return {
      .label = label,
      .advice = is_backward  // at most 127 characters
                    ? "or a rank has fewer batches, or its loss leaves the result out, or graphs "
                      "differ: give it a group.split(0) of its own"
                    : "or a rank has fewer batches, or its loss leaves the result out"};
}

int64_t sum_of(const Counts& counts) {
  return std::accumulate(counts.begin(), counts.end(), int64_t{0});
}

// As the input, with another number of rows.
at::Tensor rows_like(const at::Tensor& input, int64_t rows) {
  auto sizes = input.sizes().vec();
  sizes[0] = rows;
  return at::empty(sizes, input.options());
}

// One for each rank.
std::vector<at::Tensor> parts_of(const at::Tensor& rows, const Counts& counts) {
  return rows.split_with_sizes(counts, 0);
}

struct AllReduce : torch::autograd::Function<AllReduce> {
  static at::Tensor forward(AutogradContext* ctx, const at::Tensor& input, const Group& group) {
    hold_group(*ctx, group);
    at::Tensor sum = input.clone(at::MemoryFormat::Contiguous);
    group.all_reduce(sum, ReduceOp::Sum, call_of("functional::all_reduce")).wait();
    return sum;
  }
  static variable_list backward(AutogradContext* ctx, const variable_list& slopes) {
    return {apply(slopes[0], held_group(*ctx)), {}};
  }
};

struct AllGather : torch::autograd::Function<AllGather> {
  // counts[r] are rank r's rows.
  static at::Tensor forward(AutogradContext* ctx, const at::Tensor& input, const Counts& counts,
                            const Group& group) {
    hold_group(*ctx, group);
    ctx->saved_data["counts"] = counts;
    const at::Tensor all = rows_like(input, sum_of(counts));
    group.all_gather(parts_of(all, counts), input, call_of("functional::all_gather")).wait();
    return all;
  }
  static variable_list backward(AutogradContext* ctx, const variable_list& slopes);
};

struct ReduceScatter : torch::autograd::Function<ReduceScatter> {
  // counts[r] rows of the sum are for rank r.
  static at::Tensor forward(AutogradContext* ctx, const at::Tensor& input, const Counts& counts,
                            const Group& group) {
    hold_group(*ctx, group);
    ctx->saved_data["counts"] = counts;
    const at::Tensor mine = rows_like(input, counts[static_cast<size_t>(group.rank())]);
    group
        .reduce_scatter(mine, parts_of(input.contiguous(), counts), ReduceOp::Sum,
                        call_of("functional::reduce_scatter"))
        .wait();
    return mine;
  }
  static variable_list backward(AutogradContext* ctx, const variable_list& slopes) {
    const auto counts = ctx->saved_data["counts"].toIntVector();
    return {AllGather::apply(slopes[0], counts, held_group(*ctx)), {}, {}};
  }
};

variable_list AllGather::backward(AutogradContext* ctx, const variable_list& slopes) {
  const auto counts = ctx->saved_data["counts"].toIntVector();
  return {ReduceScatter::apply(slopes[0], counts, held_group(*ctx)), {}, {}};
}

struct AllToAll : torch::autograd::Function<AllToAll> {
  static at::Tensor forward(AutogradContext* ctx, const at::Tensor& input, const Counts& sent,
                            const Counts& received, const Group& group) {
    hold_group(*ctx, group);
    ctx->saved_data["sent"] = sent;
    ctx->saved_data["received"] = received;
    const at::Tensor rows = rows_like(input, sum_of(received));
    group
        .all_to_all(parts_of(rows, received), parts_of(input.contiguous(), sent),
                    call_of("functional::all_to_all"))
        .wait();
    return rows;
  }
  static variable_list backward(AutogradContext* ctx, const variable_list& slopes) {
    const auto sent = ctx->saved_data["sent"].toIntVector();
    const auto received = ctx->saved_data["received"].toIntVector();
    return {apply(slopes[0], received, sent, held_group(*ctx)), {}, {}, {}};
  }
};

void check_group(std::string_view name, const Group& group) {
  group.refuse_python_ranks(fmt::format("functional::{}", name));
  parallel::refuse_lanes(group, fmt::format("functional::{}", name),
                         "train without lanes, or on the samples of one lane");
}

void check_rows(std::string_view name, const at::Tensor& input) {
  if (input.dim() > 0) return;
  throw ConfigError(fmt::format(
      "[functional] {} of a tensor without dimensions: its rows are what ranks get", name));
}

void check_op(std::string_view name, ReduceOp op) {
  if (op == ReduceOp::Sum || op == ReduceOp::Average) return;
  throw ConfigError(
      fmt::format("[functional] {} differentiates ReduceOp::Sum and Average only", name));
}

at::Tensor averaged(const at::Tensor& sum, ReduceOp op, const Group& group) {
  return op == ReduceOp::Average ? sum / group.size() : sum;
}

// Throws on all ranks unless their inputs differ in rows only. Returns each rank's number of them.
Counts rows_of_ranks(const at::Tensor& input, const Group& group) {
  constexpr int64_t kDimensions = 16;
  constexpr int64_t kRows = 0, kRest = 1;
  const int64_t count = input.dim();
  if (count > kDimensions) {
    throw ConfigError(
        fmt::format("[functional] all_gather of {} dimensions: at most {}", count, kDimensions));
  }
  const at::Tensor mine = at::zeros({2 + kDimensions}, at::kLong);
  mine[kRows] = input.size(0);
  mine[kRest] = count * 100 + static_cast<int64_t>(input.scalar_type());
  for (int64_t i = 1; i < count; ++i) mine[kRest + i] = input.size(i);
  const at::Tensor all = at::empty({group.size(), mine.numel()}, at::kLong);
  group.all_gather(all, mine, call_of("functional::all_gather's rows")).wait();
  if (!all.narrow(1, kRest, 1 + kDimensions)
           .eq(mine.narrow(0, kRest, 1 + kDimensions))
           .all()
           .item<bool>()) {
    throw ConfigError(fmt::format(
        "[functional] all_gather: the ranks' inputs differ in more than rows; rank {}'s is {} [{}]",
        group.rank(), comm::name_of(input.scalar_type()), fmt::join(input.sizes(), ", ")));
  }
  const at::Tensor rows = all.select(1, kRows).contiguous();
  return {rows.const_data_ptr<int64_t>(), rows.const_data_ptr<int64_t>() + rows.numel()};
}

}  // namespace

at::Tensor all_reduce(const at::Tensor& input, const Group& group, ReduceOp op) {
  check_group("all_reduce", group);
  check_op("all_reduce", op);
  return averaged(AllReduce::apply(input, group), op, group);
}

at::Tensor all_gather(const at::Tensor& input, const Group& group) {
  check_group("all_gather", group);
  check_rows("all_gather", input);
  return AllGather::apply(input, rows_of_ranks(input, group), group);
}

at::Tensor reduce_scatter(const at::Tensor& input, const Group& group, ReduceOp op) {
  check_group("reduce_scatter", group);
  check_op("reduce_scatter", op);
  check_rows("reduce_scatter", input);
  const int64_t ranks = group.size();
  if (input.size(0) % ranks != 0) {
    throw ConfigError(
        fmt::format("[functional] reduce_scatter of {} rows, which {} ranks cannot divide equally",
                    input.size(0), ranks));
  }
  const Counts counts(static_cast<size_t>(ranks), input.size(0) / ranks);
  return averaged(ReduceScatter::apply(input, counts, group), op, group);
}

Exchanged all_to_all(const at::Tensor& input, const Counts& counts, const Group& group) {
  check_group("all_to_all", group);
  check_rows("all_to_all", input);
  if (counts.size() != static_cast<size_t>(group.size()) ||
      std::ranges::any_of(counts, [](int64_t count) { return count < 0; }) ||
      sum_of(counts) != input.size(0)) {
    throw ConfigError(fmt::format(
        "[functional] all_to_all of {} rows with the counts [{}]: one for each of {} ranks, of "
        "this sum",
        input.size(0), fmt::join(counts, ", "), group.size()));
  }
  Exchanged result{.rows = {}, .counts = Counts(counts.size())};
  const at::Tensor received = at::empty({group.size()}, at::kLong);
  group
      .all_to_all(received, at::tensor(counts, at::kLong), call_of("functional::all_to_all's rows"))
      .wait();
  std::copy_n(received.const_data_ptr<int64_t>(), counts.size(), result.counts.begin());
  result.rows = AllToAll::apply(input, counts, result.counts, group);
  return result;
}

}  // namespace lockstep::functional
