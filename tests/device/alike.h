// The same call on CPU tensors and on device tensors, in one group.
#pragma once

#include <ATen/ATen.h>
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <cmath>
#include <functional>
#include <string>
#include <vector>

#include "lockstep/comm/world.h"

namespace lockstep::test {

inline const std::vector<at::ScalarType> kDtypes = {
    at::kFloat,        at::kDouble,       at::kHalf,   at::kBFloat16,      at::kChar,
    at::kShort,        at::kInt,          at::kLong,   at::kByte,          at::kBool,
    at::kUInt16,       at::kUInt32,       at::kUInt64, at::kFloat8_e4m3fn, at::kFloat8_e5m2,
    at::kComplexFloat, at::kComplexDouble};
inline const std::vector<int64_t> kSizes = {0, 1, 7, 100003};

inline at::Tensor values(int64_t count, int rank, at::ScalarType dtype, int low = 0) {
  return (at::arange(count, at::kLong) + rank).remainder(3).add(low).to(dtype);
}

// The same call on both: `call(tensors)` gets copies of `inputs` and writes to some of them.
inline void expect_alike(World& world, const std::vector<at::Tensor>& inputs,
                         const std::function<void(std::vector<at::Tensor>&)>& call,
                         const std::string& what) {
  std::vector<at::Tensor> here, there;
  for (const at::Tensor& input : inputs) {
    here.push_back(input.clone());
    there.push_back(input.to(world.device()));
  }
  call(here);
  call(there);
  for (size_t i = 0; i < inputs.size(); ++i) {
    ASSERT_EQ(there[i].device(), world.device());
    const at::Tensor back = there[i].cpu();
    // libtorch compares not all dtypes, but bytes; -0 is 0.
    const bool is_rare = back.element_size() == 1 || at::isComplexType(back.scalar_type()) ||
                         at::isBarebonesUnsignedType(back.scalar_type());
    EXPECT_TRUE(is_rare ? at::equal(back.reshape({-1}).view(at::kByte),
                                    here[i].reshape({-1}).view(at::kByte))
                        : at::equal(back, here[i]))
        << what << ", tensor " << i << " on rank " << world.rank();
  }
}

template <class Body>
void for_all(const Body& body) {
  for (auto dtype : kDtypes) {
    for (int64_t size : kSizes)
      body(dtype, size, fmt::format("{} x {}", c10::toString(dtype), size));
  }
}

inline void expect_not_a_number_wins(World& world) {
  for (auto op : {ReduceOp::Min, ReduceOp::Max}) {
    for (auto dtype : {at::kFloat, at::kBFloat16, at::kHalf, at::kDouble}) {
      at::Tensor data = at::full({40}, 1, dtype);
      if (world.rank() == world.size() - 1) data[3] = NAN;
      at::Tensor there = data.to(world.device());
      world.group().all_reduce(there, op).wait();
      const at::Tensor back = there.cpu();
      EXPECT_TRUE(back[3].isnan().item<bool>());
      EXPECT_EQ(back.isnan().sum().item<int64_t>(), 1);
      EXPECT_EQ(back[2].item<float>(), 1);
    }
  }
}

}  // namespace lockstep::test
