#include "c10d/tensors.h"

#include <ATen/ATen.h>
#include <c10/util/Exception.h>

#include <memory>

#include "comm/assign.h"
#include "comm/check.h"

namespace lockstep::c10d_backend {
namespace {

using comm::Work;

at::Tensor pairs(const at::Tensor& tensor) {
  TORCH_CHECK_VALUE(!tensor.is_conj(),
                    "[lockstep] the conjugate of a tensor is not in memory as an operation has to "
                    "leave it there: use .resolve_conj()");
  return at::view_as_real(tensor.detach());
}

// libtorch refuses it where it would refuse to write the tensor.
at::Tensor coalesced(const at::Tensor& tensor) {
  const comm::Writing writing(tensor);
  return tensor.coalesce();
}

}  // namespace

at::Tensor plain(const at::Tensor& tensor) {
  if (tensor.is_complex()) return pairs(tensor);
  if (comm::carried(tensor.scalar_type())) return tensor;
  TORCH_CHECK_VALUE(tensor.is_contiguous(), "[lockstep] a tensor of ", tensor.scalar_type(),
                    " is not contiguous: use .contiguous()");
  return tensor.detach().view({-1}).view(at::kByte);
}

std::vector<at::Tensor> plain(const std::vector<at::Tensor>& tensors) {
  std::vector<at::Tensor> out;
  for (const at::Tensor& tensor : tensors) out.push_back(plain(tensor));
  return out;
}

at::Tensor plain_input(const at::Tensor& tensor) { return plain(tensor.resolve_conj()); }

std::vector<at::Tensor> plain_inputs(const std::vector<at::Tensor>& tensors) {
  std::vector<at::Tensor> out;
  for (const at::Tensor& tensor : tensors) out.push_back(plain_input(tensor));
  return out;
}

Reduction reduction_of(const ::c10d::ReduceOp& op, at::ScalarType dtype) {
  TORCH_CHECK_VALUE(!at::isComplexType(dtype) || ::c10d::isComplexViewAsRealAllowed(op),
                    "[lockstep] complex numbers can be summed and averaged only");
  Reduction reduction;
  switch (op.op_) {
    case ::c10d::ReduceOp::SUM:
      break;
    case ::c10d::ReduceOp::AVG:
      reduction.op = comm::ReduceOp::Average;
      break;
    case ::c10d::ReduceOp::PRODUCT:
      reduction.op = comm::ReduceOp::Product;
      break;
    case ::c10d::ReduceOp::MIN:
      reduction.op = comm::ReduceOp::Min;
      break;
    case ::c10d::ReduceOp::MAX:
      reduction.op = comm::ReduceOp::Max;
      break;
    case ::c10d::ReduceOp::BAND:
      reduction.op = comm::ReduceOp::BitwiseAnd;
      break;
    case ::c10d::ReduceOp::BOR:
      reduction.op = comm::ReduceOp::BitwiseOr;
      break;
    case ::c10d::ReduceOp::BXOR:
      TORCH_CHECK_VALUE(at::isIntegralType(dtype, /*includeBool=*/true),
                        "[lockstep] BXOR is for integers and bool, not for ", dtype);
      reduction.op = comm::ReduceOp::BitwiseXor;
      break;
    case ::c10d::ReduceOp::PREMUL_SUM: {
      const auto* given = dynamic_cast<const ::c10d::PreMulSumSupplement*>(op.supplement_.get());
      TORCH_CHECK_VALUE(given != nullptr, "[lockstep] PREMUL_SUM without a factor");
      TORCH_CHECK_VALUE(!at::isIntegralType(dtype, /*includeBool=*/true),
                        "[lockstep] PREMUL_SUM is for floating point, not for ", dtype);
      const at::Tensor& factor = given->tensor_factor;  // of one element
      reduction.op = comm::ReduceOp::PreMulSum;
      reduction.factor = factor.defined() ? factor.item<double>() : given->double_factor;
      break;
    }
    default:
      TORCH_CHECK_VALUE(false, "[lockstep] an unknown reduction");
  }
  return reduction;
}

at::Tensor summand(const at::Tensor& tensor) {
  return tensor.is_complex() ? pairs(tensor) : tensor;
}

at::Tensor input_summand(const at::Tensor& input) { return summand(input.resolve_conj()); }

comm::CallOptions options_of(const Reduction& reduction, milliseconds timeout) {
  return {.timeout = timeout, .factor = reduction.factor};
}

std::vector<Stage> all_reduce_stages(const comm::Group& group, const at::Tensor& tensor,
                                     const Reduction& reduction, milliseconds timeout) {
  return {[&group, tensor, reduction, timeout] {
    return std::vector{
        group.all_reduce(summand(tensor), reduction.op, options_of(reduction, timeout))};
  }};
}

std::vector<Stage> reduce_stages(const comm::Group& group, const at::Tensor& tensor, int root,
                                 const Reduction& reduction, milliseconds timeout) {
  return {[&group, tensor, root, reduction, timeout] {
    const bool is_root = group.rank() == root;
    const at::Tensor own = is_root ? summand(tensor) : input_summand(tensor);
    return std::vector{group.reduce(own, root, reduction.op, options_of(reduction, timeout))};
  }};
}

std::vector<Stage> reduce_scatter_stages(const comm::Group& group, const at::Tensor& output,
                                         const std::vector<at::Tensor>& inputs,
                                         const Reduction& reduction, milliseconds timeout) {
  return {[&group, output, inputs, reduction, timeout] {
    std::vector<at::Tensor> in;
    for (const at::Tensor& input : inputs) in.push_back(input_summand(input));
    return std::vector{
        group.reduce_scatter(summand(output), in, reduction.op, options_of(reduction, timeout))};
  }};
}

std::vector<Stage> sparse_stages(const comm::Group& group, const at::Tensor& tensor,
                                 milliseconds timeout) {
  struct State {
    at::Tensor own;
    at::Tensor counts;  // of each rank: elements, sparse dimensions, sizes
    std::vector<at::Tensor> indices, values;
  };
  const auto state = std::make_shared<State>();
  return {[&group, tensor, state, timeout] {
            state->own = coalesced(tensor);
            std::vector<int64_t> own{state->own._nnz(), state->own.sparse_dim()};
            own.insert(own.end(), tensor.sizes().begin(), tensor.sizes().end());
            const auto length = static_cast<int64_t>(own.size());
            state->counts = at::empty({group.size(), length}, at::kLong);
            return std::vector{group.all_gather(
                state->counts, at::tensor(at::IntArrayRef(own), at::kLong), {.timeout = timeout})};
          },
          [&group, state, timeout] {
            const auto of_rank = [&state](int rank) {
              const auto length = static_cast<size_t>(state->counts.size(1));
              return at::IntArrayRef(state->counts.const_data_ptr<int64_t>() + rank * length,
                                     length);
            };
            for (int rank = 1; rank < group.size(); ++rank) {
              TORCH_CHECK_VALUE(of_rank(rank).slice(1) == of_rank(0).slice(1),
                                "[lockstep] all_reduce of sparse tensors: rank 0 has one of sizes ",
                                of_rank(0).slice(2), " with ", of_rank(0)[1],
                                " sparse dimensions, rank ", rank, " one of ",
                                of_rank(rank).slice(2), " with ", of_rank(rank)[1]);
            }
            const at::Tensor indices = state->own._indices().contiguous();
            const at::Tensor values = state->own._values().contiguous();
            for (int rank = 0; rank < group.size(); ++rank) {
              const int64_t count = of_rank(rank)[0];
              auto sizes = values.sizes().vec();
              sizes[0] = count;
              state->indices.push_back(at::empty({indices.size(0), count}, indices.options()));
              state->values.push_back(at::empty(sizes, values.options()));
            }
            return std::vector{
                group.all_gather(state->indices, indices, {.timeout = timeout}),
                group.all_gather(plain(state->values), plain_input(values), {.timeout = timeout})};
          },
          [tensor, state]() -> std::vector<Work> {
            const at::Tensor sum =
                at::sparse_coo_tensor(at::cat(state->indices, 1), at::cat(state->values, 0),
                                      tensor.sizes(), tensor.options());
            comm::assign(tensor, sum.coalesce());
            return {};
          }};
}

}  // namespace lockstep::c10d_backend
