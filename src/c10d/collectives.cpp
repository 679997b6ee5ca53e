// The backend's collectives. Gloo's take several tensors in a call, each as if it were another
// rank's; so do these.
#include <ATen/ATen.h>

#include <utility>

#include "c10d/process_group.h"
#include "comm/assign.h"

namespace lockstep::c10d_backend {
namespace {

using comm::Work;
using Tensors = ProcessGroup::Tensors;
using ::c10d::OpType;

template <class... Stages>
std::vector<Stage> stages(Stages... each) {
  return {Stage(std::move(each))...};
}

Tensors flat_list(const ProcessGroup::Lists& lists) {
  Tensors all;
  for (const Tensors& list : lists) all.insert(all.end(), list.begin(), list.end());
  return all;
}

// One stage that starts the first stages of many: of collectives that have no second.
void append(std::vector<Stage>& all, std::vector<Stage> more) {
  for (Stage& stage : more) all.push_back(std::move(stage));
}

// The elements of all, combined into the first, as if the others were other ranks'.
void combine(const Tensors& tensors, const ::c10d::ReduceOp& op) {
  const at::Tensor& into = tensors[0];
  const comm::Writing writing(into);
  for (size_t i = 1; i < tensors.size(); ++i) {
    switch (op.op_) {
      case ::c10d::ReduceOp::SUM:
      case ::c10d::ReduceOp::AVG:
      case ::c10d::ReduceOp::PREMUL_SUM:
        into.add_(tensors[i]);
        break;
      case ::c10d::ReduceOp::PRODUCT:
        into.mul_(tensors[i]);
        break;
      case ::c10d::ReduceOp::MIN:
        into.copy_(at::minimum(into, tensors[i]));
        break;
      case ::c10d::ReduceOp::MAX:
        into.copy_(at::maximum(into, tensors[i]));
        break;
      case ::c10d::ReduceOp::BAND:
        into.bitwise_and_(tensors[i]);
        break;
      case ::c10d::ReduceOp::BOR:
        into.bitwise_or_(tensors[i]);
        break;
      default:
        into.bitwise_xor_(tensors[i]);
    }
  }
}

// tensors[1] and so on become tensors[0].
Stage spread(const Tensors& tensors) {
  return [tensors]() -> std::vector<Work> {
    for (size_t i = 1; i < tensors.size(); ++i) comm::assign(tensors[i], tensors[0]);
    return {};
  };
}

void check_alike(const Tensors& tensors, const char* what) {
  TORCH_CHECK_VALUE(!tensors.empty(), "[lockstep] ", what, " of no tensor");
  for (const at::Tensor& tensor : tensors) {
    TORCH_CHECK_VALUE(
        tensor.scalar_type() == tensors[0].scalar_type() && tensor.sizes() == tensors[0].sizes(),
        "[lockstep] ", what, " of tensors of different sizes or dtypes");
  }
}

}  // namespace

const at::Tensor& ProcessGroup::only(const Tensors& tensors, const char* what) {
  TORCH_CHECK_VALUE(tensors.size() == 1, "[lockstep] ", what, " takes one tensor, not ",
                    tensors.size());
  return tensors[0];
}

at::Tensor ProcessGroup::allocateTensor(long size, at::TensorOptions options) {
  const auto out = std::make_shared<at::Tensor>();
  run({OpType::UNKNOWN, {}, options_->timeout, false},
      stages([this, out, size, options]() -> std::vector<Work> {
        *out = group().empty({size}, options);
        return {};
      }));
  return *out;
}

ProcessGroup::WorkPtr ProcessGroup::allreduce(Tensors& tensors,
                                              const ::c10d::AllreduceOptions& opts) {
  const CoalescingGuard guard{coalescing_};
  check_alike(tensors, "all_reduce");
  if (tensors[0].layout() != at::kStrided) return allreduce_sparse(tensors, opts);
  const milliseconds timeout = timeout_of(opts.timeout);
  const Reduction reduction = reduction_of(opts.reduceOp, tensors[0].scalar_type());
  std::vector<Stage> all;
  if (tensors.size() > 1) {
    TORCH_CHECK_VALUE(opts.reduceOp.op_ != ::c10d::ReduceOp::AVG,
                      "[lockstep] all_reduce: AVG takes one tensor a call");
    all = stages([tensors, op = opts.reduceOp]() -> std::vector<Work> {
      combine(tensors, op);
      return {};
    });
  }
  append(all, all_reduce_stages(group(), tensors[0], reduction, timeout));
  if (tensors.size() > 1) all.push_back(spread(tensors));
  return run({OpType::ALLREDUCE, tensors, opts.timeout, opts.asyncOp}, std::move(all));
}

ProcessGroup::WorkPtr ProcessGroup::allreduce_sparse(Tensors& tensors,
                                                     const ::c10d::AllreduceOptions& opts) {
  const CoalescingGuard guard{coalescing_};
  const at::Tensor tensor = only(tensors, "all_reduce of sparse tensors");
  TORCH_CHECK_VALUE(tensor.layout() == at::kSparse && opts.reduceOp.op_ == ::c10d::ReduceOp::SUM,
                    "[lockstep] all_reduce of sparse tensors takes COO tensors and sums them");
  return run({OpType::_ALLREDUCE_SPARSE, tensors, opts.timeout, opts.asyncOp},
             sparse_stages(group(), tensor, timeout_of(opts.timeout)));
}

ProcessGroup::WorkPtr ProcessGroup::allreduce_coalesced(
    Tensors& tensors, const ::c10d::AllreduceCoalescedOptions& opts) {
  const CoalescingGuard guard{coalescing_};
  std::vector<Stage> all;
  for (const at::Tensor& tensor : tensors) {
    append(all,
           all_reduce_stages(group(), tensor, reduction_of(opts.reduceOp, tensor.scalar_type()),
                             timeout_of(opts.timeout)));
  }
  if (all.empty()) all = stages([]() -> std::vector<Work> { return {}; });
  return run({OpType::ALLREDUCE_COALESCED, tensors, opts.timeout, opts.asyncOp}, std::move(all));
}

ProcessGroup::WorkPtr ProcessGroup::broadcast(Tensors& tensors,
                                              const ::c10d::BroadcastOptions& opts) {
  const CoalescingGuard guard{coalescing_};
  check_alike(tensors, "broadcast");
  TORCH_CHECK_VALUE(opts.rootTensor >= 0 && opts.rootTensor < static_cast<int64_t>(tensors.size()),
                    "[lockstep] broadcast: no tensor ", opts.rootTensor);
  Tensors ordered = tensors;
  std::swap(ordered[0], ordered[opts.rootTensor]);
  const int root = static_cast<int>(opts.rootRank);
  const at::Tensor first = getRank() == root ? plain_input(ordered[0]) : plain(ordered[0]);
  auto all = stages([this, tensor = first, root, timeout = timeout_of(opts.timeout)] {
    return std::vector{group().broadcast(tensor, root, {.timeout = timeout})};
  });
  if (tensors.size() > 1) all.push_back(spread(ordered));
  return run({OpType::BROADCAST, tensors, opts.timeout, opts.asyncOp}, std::move(all));
}

ProcessGroup::WorkPtr ProcessGroup::reduce(Tensors& tensors, const ::c10d::ReduceOptions& opts) {
  const CoalescingGuard guard{coalescing_};
  const at::Tensor tensor = only(tensors, "reduce");
  return run(
      {OpType::REDUCE, tensors, opts.timeout, opts.asyncOp},
      reduce_stages(group(), tensor, static_cast<int>(opts.rootRank),
                    reduction_of(opts.reduceOp, tensor.scalar_type()), timeout_of(opts.timeout)));
}

ProcessGroup::WorkPtr ProcessGroup::allgather(Lists& outputs, Tensors& inputs,
                                              const ::c10d::AllgatherOptions& opts) {
  const CoalescingGuard guard{coalescing_};
  check_alike(inputs, "all_gather");
  const size_t count = inputs.size();
  TORCH_CHECK_VALUE(outputs.size() == count, "[lockstep] all_gather of ", count, " tensors into ",
                    outputs.size(), " lists");
  for (const Tensors& list : outputs) {
    TORCH_CHECK_VALUE(list.size() == count * static_cast<size_t>(getSize()),
                      "[lockstep] all_gather of ", count, " tensors of ", getSize(),
                      " ranks into a list of ", list.size());
  }
  auto all = stages([this, outputs, inputs, timeout = timeout_of(opts.timeout)] {
    std::vector<Work> works;
    for (size_t i = 0; i < inputs.size(); ++i) {
      Tensors of_ranks;
      for (int rank = 0; rank < getSize(); ++rank)
        of_ranks.push_back(plain(outputs[0][rank * inputs.size() + i]));
      works.push_back(group().all_gather(of_ranks, plain_input(inputs[i]), {.timeout = timeout}));
    }
    return works;
  });
  if (count > 1) {
    all.push_back([outputs]() -> std::vector<Work> {
      for (size_t list = 1; list < outputs.size(); ++list) {
        for (size_t i = 0; i < outputs[list].size(); ++i)
          comm::assign(outputs[list][i], outputs[0][i]);
      }
      return {};
    });
  }
  return run({OpType::ALLGATHER, flat_list(outputs), opts.timeout, opts.asyncOp}, std::move(all));
}

ProcessGroup::WorkPtr ProcessGroup::_allgather_base(at::Tensor& output, at::Tensor& input,
                                                    const ::c10d::AllgatherOptions& opts) {
  const CoalescingGuard guard{coalescing_};
  return run({OpType::_ALLGATHER_BASE, {output}, opts.timeout, opts.asyncOp},
             stages([this, output = plain(output), input = plain_input(input),
                     timeout = timeout_of(opts.timeout)] {
               return std::vector{group().all_gather(output, input, {.timeout = timeout})};
             }));
}

ProcessGroup::WorkPtr ProcessGroup::allgather_coalesced(Lists& outputs, Tensors& inputs,
                                                        const ::c10d::AllgatherOptions& opts) {
  const CoalescingGuard guard{coalescing_};
  TORCH_CHECK_VALUE(outputs.size() == static_cast<size_t>(getSize()), "[lockstep] all_gather of ",
                    getSize(), " ranks into ", outputs.size(), " lists");
  for (const Tensors& of_rank : outputs) {
    TORCH_CHECK_VALUE(of_rank.size() == inputs.size(), "[lockstep] all_gather of ", inputs.size(),
                      " tensors into a list of ", of_rank.size());
  }
  return run({OpType::ALLGATHER_COALESCED, flat_list(outputs), opts.timeout, opts.asyncOp},
             stages([this, outputs, inputs, timeout = timeout_of(opts.timeout)] {
               std::vector<Work> works;
               for (size_t i = 0; i < inputs.size(); ++i) {
                 Tensors of_ranks;
                 for (const Tensors& of_rank : outputs) of_ranks.push_back(plain(of_rank[i]));
                 works.push_back(
                     group().all_gather(of_ranks, plain_input(inputs[i]), {.timeout = timeout}));
               }
               return works;
             }));
}

ProcessGroup::WorkPtr ProcessGroup::allgather_into_tensor_coalesced(
    Tensors& outputs, Tensors& inputs, const ::c10d::AllgatherOptions& opts) {
  const CoalescingGuard guard{coalescing_};
  TORCH_CHECK_VALUE(outputs.size() == inputs.size(), "[lockstep] all_gather of ", inputs.size(),
                    " tensors into ", outputs.size());
  return run({OpType::ALLGATHER_INTO_TENSOR_COALESCED, outputs, opts.timeout, opts.asyncOp},
             stages([this, outputs = plain(outputs), inputs = plain_inputs(inputs),
                     timeout = timeout_of(opts.timeout)] {
               std::vector<Work> works;
               for (size_t i = 0; i < inputs.size(); ++i)
                 works.push_back(group().all_gather(outputs[i], inputs[i], {.timeout = timeout}));
               return works;
             }));
}

ProcessGroup::WorkPtr ProcessGroup::gather(Lists& outputs, Tensors& inputs,
                                           const ::c10d::GatherOptions& opts) {
  const CoalescingGuard guard{coalescing_};
  const at::Tensor input = only(inputs, "gather");
  const int root = static_cast<int>(opts.rootRank);
  TORCH_CHECK_VALUE(outputs.size() == (getRank() == root ? 1u : 0u),
                    "[lockstep] gather: the root alone gives one list of outputs");
  const Tensors all = getRank() == root ? outputs[0] : Tensors();
  return run({OpType::GATHER, all, opts.timeout, opts.asyncOp},
             stages([this, all = plain(all), input = plain_input(input), root,
                     timeout = timeout_of(opts.timeout)] {
               return std::vector{group().gather(all, input, root, {.timeout = timeout})};
             }));
}

ProcessGroup::WorkPtr ProcessGroup::gather_into_tensor(at::Tensor& output, at::Tensor& input,
                                                       const ::c10d::GatherOptions& opts) {
  const CoalescingGuard guard{coalescing_};
  Lists outputs;
  if (getRank() == opts.rootRank) {
    TORCH_CHECK_VALUE(output.is_contiguous() && output.numel() == getSize() * input.numel(),
                      "[lockstep] gather: the output is not a contiguous tensor of ", getSize(),
                      " inputs");
    outputs.push_back(output.view({-1}).split(std::max<int64_t>(1, input.numel())));
    if (input.numel() == 0) outputs[0].assign(getSize(), output);
  }
  Tensors inputs{input};
  return gather(outputs, inputs, opts);
}

ProcessGroup::WorkPtr ProcessGroup::scatter(Tensors& outputs, Lists& inputs,
                                            const ::c10d::ScatterOptions& opts) {
  const CoalescingGuard guard{coalescing_};
  const at::Tensor output = only(outputs, "scatter");
  const int root = static_cast<int>(opts.rootRank);
  TORCH_CHECK_VALUE(inputs.size() == (getRank() == root ? 1u : 0u),
                    "[lockstep] scatter: the root alone gives one list of inputs");
  return run({OpType::SCATTER, outputs, opts.timeout, opts.asyncOp},
             stages([this, output = plain(output),
                     all = getRank() == root ? plain_inputs(inputs[0]) : Tensors(), root,
                     timeout = timeout_of(opts.timeout)] {
               return std::vector{group().scatter(output, all, root, {.timeout = timeout})};
             }));
}

ProcessGroup::WorkPtr ProcessGroup::reduce_scatter(Tensors& outputs, Lists& inputs,
                                                   const ::c10d::ReduceScatterOptions& opts) {
  const CoalescingGuard guard{coalescing_};
  const at::Tensor output = only(outputs, "reduce_scatter");
  TORCH_CHECK_VALUE(inputs.size() == 1, "[lockstep] reduce_scatter takes one list of inputs");
  return run({OpType::REDUCE_SCATTER, outputs, opts.timeout, opts.asyncOp},
             reduce_scatter_stages(group(), output, inputs[0],
                                   reduction_of(opts.reduceOp, output.scalar_type()),
                                   timeout_of(opts.timeout)));
}

ProcessGroup::WorkPtr ProcessGroup::_reduce_scatter_base(at::Tensor& output, at::Tensor& input,
                                                         const ::c10d::ReduceScatterOptions& opts) {
  Tensors outputs{output}, inputs{input};
  return reduce_scatter_tensor_coalesced(outputs, inputs, opts);
}

ProcessGroup::WorkPtr ProcessGroup::reduce_scatter_tensor_coalesced(
    Tensors& outputs, Tensors& inputs, const ::c10d::ReduceScatterOptions& opts) {
  const CoalescingGuard guard{coalescing_};
  std::vector<Stage> all;
  TORCH_CHECK_VALUE(outputs.size() == inputs.size() && !outputs.empty(),
                    "[lockstep] reduce_scatter of ", inputs.size(), " tensors into ",
                    outputs.size());
  const milliseconds timeout = timeout_of(opts.timeout);
  for (size_t i = 0; i < outputs.size(); ++i) {
    const Reduction reduction = reduction_of(opts.reduceOp, outputs[i].scalar_type());
    all.push_back([this, output = outputs[i], input = inputs[i], reduction, timeout] {
      return std::vector{group().reduce_scatter(summand(output), input_summand(input), reduction.op,
                                                options_of(reduction, timeout))};
    });
  }
  const auto type =
      outputs.size() == 1 ? OpType::_REDUCE_SCATTER_BASE : OpType::REDUCE_SCATTER_TENSOR_COALESCED;
  return run({type, outputs, opts.timeout, opts.asyncOp}, std::move(all));
}

ProcessGroup::WorkPtr ProcessGroup::alltoall_base(at::Tensor& output, at::Tensor& input,
                                                  std::vector<int64_t>& out_splits,
                                                  std::vector<int64_t>& in_splits,
                                                  const ::c10d::AllToAllOptions& opts) {
  const CoalescingGuard guard{coalescing_};
  if (out_splits.empty() && in_splits.empty()) {
    return run({OpType::ALLTOALL_BASE, {output}, opts.timeout, opts.asyncOp},
               stages([this, output = plain(output), input = plain_input(input),
                       timeout = timeout_of(opts.timeout)] {
                 return std::vector{group().all_to_all(output, input, {.timeout = timeout})};
               }));
  }
  const auto cut = [this](const at::Tensor& tensor, const std::vector<int64_t>& splits) {
    if (!splits.empty()) return tensor.split_with_sizes(splits, 0);
    TORCH_CHECK_VALUE(tensor.size(0) % getSize() == 0, "[lockstep] all_to_all: ", tensor.size(0),
                      " rows do not divide among ", getSize(), " ranks");
    return tensor.split_with_sizes(std::vector<int64_t>(getSize(), tensor.size(0) / getSize()), 0);
  };
  Tensors outputs = cut(output, out_splits), inputs = cut(input, in_splits);
  return alltoall(outputs, inputs, opts);
}

ProcessGroup::WorkPtr ProcessGroup::alltoall(Tensors& outputs, Tensors& inputs,
                                             const ::c10d::AllToAllOptions& opts) {
  const CoalescingGuard guard{coalescing_};
  return run({OpType::ALLTOALL, outputs, opts.timeout, opts.asyncOp},
             stages([this, outputs = plain(outputs), inputs = plain_inputs(inputs),
                     timeout = timeout_of(opts.timeout)] {
               return std::vector{group().all_to_all(outputs, inputs, {.timeout = timeout})};
             }));
}

ProcessGroup::WorkPtr ProcessGroup::barrier(const ::c10d::BarrierOptions& opts) {
  return run({OpType::BARRIER, {}, opts.timeout, opts.asyncOp},
             stages([this, timeout = timeout_of(opts.timeout)] {
               return std::vector{group().barrier({.timeout = timeout})};
             }));
}

}  // namespace lockstep::c10d_backend
