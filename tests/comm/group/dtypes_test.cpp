// Numbers of every kind beside those of collectives_test.cpp: small floats, unsigned integers,
// complex numbers; and the reductions that not all kinds have. The reference rounds each node of
// the tree over ranks to the dtype, so results are compared by their bytes: tolerance 0.
#include <ATen/ATen.h>
#include <gmock/gmock.h>

#include <cstring>
#include <limits>

#include "lockstep/core/error.h"
#include "support/spawn.h"
#include "support/thrown.h"

// A namespace of its own: the helpers have the names of those in collectives_test.cpp.
namespace lockstep::comm::dtypes {
namespace {

using test::name_of;
using test::Ranks;
using test::spawn;

class Dtypes : public testing::TestWithParam<Ranks> {
 protected:
  void run(const std::function<void(World&)>& body) { spawn(GetParam(), body); }
};

INSTANTIATE_TEST_SUITE_P(On, Dtypes,
                         testing::Values(Ranks{"shm", 1}, Ranks{"shm", 3}, Ranks{"tcp", 3},
                                         Ranks{"gloo", 3}, Ranks{"auto", 4, {0, 0, 1, 1}},
                                         Ranks{"auto", 5, {0, 0, 0, 1, 1}}),
                         name_of);

constexpr at::ScalarType kSmallFloats[] = {at::kFloat8_e4m3fn, at::kFloat8_e5m2};
constexpr at::ScalarType kUnsigned[] = {at::kUInt16, at::kUInt32, at::kUInt64};
constexpr at::ScalarType kComplex[] = {at::kComplexFloat, at::kComplexDouble};
constexpr int64_t kSizes[] = {0, 1, 37, 9001};

bool same(const at::Tensor& a, const at::Tensor& b) {
  return a.scalar_type() == b.scalar_type() &&
         at::equal(a.reshape({-1}).view(at::kByte), b.reshape({-1}).view(at::kByte));
}

// Differs by rank and place. Unsigned ones have the highest bit, small floats grow beyond their
// range when they are added up.
at::Tensor values(int64_t count, int rank, at::ScalarType dtype) {
  const at::Tensor base = (at::arange(count, at::kLong) * 7 + rank * 5).remainder(23) - 9;
  if (at::isComplexType(dtype)) {
    const at::Tensor real = base.to(at::toRealValueType(dtype)) / 3;
    return at::complex(real, real * -2 + rank);
  }
  if (at::isFloatingType(dtype)) return (base.to(at::kFloat) * 21 / 4).to(dtype);
  const int64_t bits = static_cast<int64_t>(c10::elementSize(dtype)) * 8;
  return (base + (int64_t{1} << (bits - 1)) * (rank % 2)).to(at::kLong).to(dtype);
}

at::Tensor divided(const at::Tensor& sum, int by) {
  const at::ScalarType dtype = sum.scalar_type();
  if (at::isComplexType(dtype)) return at::view_as_complex(at::view_as_real(sum) / by);
  if (at::isFloatingType(dtype)) return (sum.to(at::kFloat) / by).to(dtype);
  at::Tensor result = sum.clone();
  for (int64_t i = 0; i < sum.numel(); ++i) {
    void* at = static_cast<char*>(result.data_ptr()) + i * sum.element_size();
    uint64_t value = 0;
    std::memcpy(&value, at, sum.element_size());
    value /= static_cast<uint64_t>(by);
    std::memcpy(at, &value, sum.element_size());
  }
  return result;
}

// Two ranks' values, or sums of them, rounded to the dtype.
at::Tensor combined(ReduceOp op, const at::Tensor& a, const at::Tensor& b) {
  const at::ScalarType dtype = a.scalar_type();
  if (dtype == at::kUInt64 && (op == ReduceOp::Min || op == ReduceOp::Max)) {
    const int64_t first = std::numeric_limits<int64_t>::min();
    const at::Tensor x = a.view(at::kLong).bitwise_xor(first),
                     y = b.view(at::kLong).bitwise_xor(first);
    return (op == ReduceOp::Min ? at::minimum(x, y) : at::maximum(x, y))
        .bitwise_xor(first)
        .view(dtype);
  }
  if (at::isComplexType(dtype) && op == ReduceOp::Product) {
    // Two products and their difference, each rounded: a kernel of libtorch's may round less.
    const at::Tensor real = at::real(a) * at::real(b), other = at::imag(a) * at::imag(b);
    const at::Tensor left = at::real(a) * at::imag(b), right = at::imag(a) * at::real(b);
    return at::complex(real - other, left + right);
  }
  const bool exact = at::isComplexType(dtype);
  const at::Tensor x = exact ? a : at::isFloatingType(dtype) ? a.to(at::kFloat) : a.to(at::kLong);
  const at::Tensor y = exact ? b : at::isFloatingType(dtype) ? b.to(at::kFloat) : b.to(at::kLong);
  switch (op) {
    case ReduceOp::Min:
      return at::minimum(x, y).to(dtype);
    case ReduceOp::Max:
      return at::maximum(x, y).to(dtype);
    case ReduceOp::Product:
      return (x * y).to(dtype);
    case ReduceOp::BitwiseAnd:
      return at::bitwise_and(x, y).to(dtype);
    case ReduceOp::BitwiseOr:
      return at::bitwise_or(x, y).to(dtype);
    case ReduceOp::BitwiseXor:
      return at::bitwise_xor(x, y).to(dtype);
    default:
      return (x + y).to(dtype);
  }
}

at::Tensor tree(ReduceOp op, int begin, int end, const std::function<at::Tensor(int)>& of) {
  if (end - begin == 1) return of(begin);
  int left = 1;
  while (2 * left < end - begin) left *= 2;
  return combined(op, tree(op, begin, begin + left, of), tree(op, begin + left, end, of));
}

at::Tensor reference(ReduceOp op, int ranks, const std::function<at::Tensor(int)>& of) {
  const at::Tensor all = tree(op, 0, ranks, of);
  return op == ReduceOp::Average ? divided(all, ranks) : all;
}

void expect_reduced(const World& world, at::ScalarType dtype, std::initializer_list<ReduceOp> ops) {
  const Group& group = world.group();
  const int n = world.size(), me = world.rank();
  for (const ReduceOp op : ops) {
    for (const int64_t size : kSizes) {
      const auto what = [&] {
        return ::testing::Message() << dtype << " x " << size << " op " << int(op);
      };
      const auto of = [&](int r) { return values(size * n, r, dtype); };
      const at::Tensor expected = reference(op, n, of);
      at::Tensor data = of(me);
      group.all_reduce(data, op).wait();
      EXPECT_TRUE(same(data, expected)) << what();
      at::Tensor part = at::empty({size}, dtype);
      group.reduce_scatter(part, of(me), op).wait();
      EXPECT_TRUE(same(part, expected.narrow(0, me * size, size))) << what();
      at::Tensor at_root = of(me);
      group.reduce(at_root, n - 1, op).wait();
      EXPECT_TRUE(same(at_root, me == n - 1 ? expected : of(me))) << what();
    }
  }
}

TEST_P(Dtypes, FloatsOfOneByteAreRoundedAtEachNode) {
  run([](World& world) {
    for (const auto dtype : kSmallFloats) {
      expect_reduced(
          world, dtype,
          {ReduceOp::Sum, ReduceOp::Average, ReduceOp::Min, ReduceOp::Max, ReduceOp::Product});
    }
  });
}

TEST_P(Dtypes, UnsignedIntegersWrapAndAreOrderedByTheirHighestBit) {
  run([](World& world) {
    for (const auto dtype : kUnsigned) {
      expect_reduced(
          world, dtype,
          {ReduceOp::Sum, ReduceOp::Average, ReduceOp::Min, ReduceOp::Max, ReduceOp::Product,
           ReduceOp::BitwiseAnd, ReduceOp::BitwiseOr, ReduceOp::BitwiseXor});
    }
  });
}

TEST_P(Dtypes, ComplexNumbersAreAddedAndMultiplied) {
  run([](World& world) {
    for (const auto dtype : kComplex)
      expect_reduced(world, dtype, {ReduceOp::Sum, ReduceOp::Average, ReduceOp::Product});
  });
}

TEST_P(Dtypes, ExclusiveOrOfTheOtherIntegers) {
  run([](World& world) {
    for (const auto dtype : {at::kChar, at::kByte, at::kShort, at::kInt, at::kLong, at::kBool})
      expect_reduced(world, dtype, {ReduceOp::BitwiseXor});
  });
}

TEST_P(Dtypes, EachRanksFactorIsAppliedBeforeTheSum) {
  run([](World& world) {
    const int n = world.size(), me = world.rank();
    const auto factor = [](int r) { return 0.5 * (r + 1); };
    for (const auto dtype :
         {at::kFloat, at::kDouble, at::kHalf, at::kBFloat16, at::kFloat8_e5m2, at::kComplexFloat}) {
      const auto scaled = [&](int r) {
        const at::Tensor of = values(6 * n, r, dtype);
        if (of.element_size() == 1) return (of.to(at::kFloat) * factor(r)).to(dtype);
        return of * factor(r);
      };
      // Halves are exact, and the sum rounds as that of two addends does.
      const at::Tensor expected = [&] {
        at::Tensor sum;
        const std::function<at::Tensor(int, int)> add = [&](int begin, int end) -> at::Tensor {
          if (end - begin == 1) return scaled(begin);
          int left = 1;
          while (2 * left < end - begin) left *= 2;
          const at::Tensor a = add(begin, begin + left), b = add(begin + left, end);
          return a.element_size() == 1 ? (a.to(at::kFloat) + b.to(at::kFloat)).to(dtype) : a + b;
        };
        return add(0, n);
      }();
      const CallOptions options{.factor = factor(me)};
      at::Tensor data = values(6 * n, me, dtype), strided = at::zeros({6 * n, 2}, dtype);
      const at::Tensor column = strided.select(1, 1), part = at::empty({6}, dtype);
      column.copy_(data);
      world.group().reduce_scatter(part, data, ReduceOp::PreMulSum, options).wait();
      EXPECT_TRUE(same(part, expected.narrow(0, 6 * me, 6))) << dtype;
      EXPECT_TRUE(same(data, values(6 * n, me, dtype))) << "the input was changed";
      at::Tensor at_root = data.clone();
      world.group().reduce(at_root, 0, ReduceOp::PreMulSum, options).wait();
      EXPECT_TRUE(same(at_root, me == 0 ? expected : data)) << dtype;
      world.group().all_reduce(data, ReduceOp::PreMulSum, options).wait();
      EXPECT_TRUE(same(data, expected)) << dtype;
      world.group().all_reduce(column, ReduceOp::PreMulSum, options).wait();
      EXPECT_TRUE(same(column.contiguous(), expected)) << dtype;
    }
  });
}

// As an Average divides them.
TEST_P(Dtypes, PartsOfComplexNumbersAreMultipliedAlone) {
  run([](World& world) {
    const at::Tensor one = at::ones({2, 3}), infinite = at::full({2, 3}, INFINITY);
    const at::Tensor data = at::complex(infinite, one).t();
    world.group().all_reduce(data, ReduceOp::PreMulSum, {.factor = 2}).wait();
    EXPECT_TRUE(at::real(data).equal(infinite.t())) << data;
    EXPECT_TRUE(at::imag(data).equal(2 * world.size() * one.t())) << data;
  });
}

TEST_P(Dtypes, AllAreMoved) {
  run([](World& world) {
    const Group& group = world.group();
    const int n = world.size(), me = world.rank();
    for (const auto dtype : {at::kFloat8_e4m3fn, at::kFloat8_e5m2, at::kUInt16, at::kUInt32,
                             at::kUInt64, at::kComplexFloat, at::kComplexDouble}) {
      at::Tensor told = values(37, me, dtype);
      group.broadcast(told, n - 1).wait();
      EXPECT_TRUE(same(told, values(37, n - 1, dtype))) << dtype;
      at::Tensor all = at::empty({n * 5}, dtype);
      group.all_gather(all, values(5, me, dtype)).wait();
      for (int r = 0; r < n; ++r)
        EXPECT_TRUE(same(all.narrow(0, r * 5, 5), values(5, r, dtype))) << dtype;
      at::Tensor swapped = at::empty({n * 3}, dtype);
      group.all_to_all(swapped, values(n * 3, me, dtype)).wait();
      for (int r = 0; r < n; ++r) {
        EXPECT_TRUE(
            same(swapped.narrow(0, r * 3, 3), values(n * 3, r, dtype).narrow(0, me * 3, 3).clone()))
            << dtype;
      }
      at::Tensor got = at::empty({9}, dtype);
      group.send_recv(got, values(9, me, dtype), {.to = (me + 1) % n, .from = (me + n - 1) % n})
          .wait();
      EXPECT_TRUE(same(got, values(9, (me + n - 1) % n, dtype))) << dtype;
    }
  });
}

// libtorch puts a conjugate off: the memory has the number itself.
TEST_P(Dtypes, ConjugatesThatWerePutOffAreTaken) {
  run([](World& world) {
    const at::Tensor own = values(11, world.rank(), at::kComplexFloat);
    at::Tensor all = at::empty({11 * world.size()}, at::kComplexFloat);
    world.group().all_gather(all, at::conj(own)).wait();
    const at::Tensor expected = at::conj(own).resolve_conj();
    EXPECT_TRUE(same(all.narrow(0, 11 * world.rank(), 11), expected));
    at::Tensor memory = own.clone();
    world.group().broadcast(at::conj(memory), 0).wait();
    EXPECT_TRUE(same(memory, values(11, 0, at::kComplexFloat)));
  });
}

TEST_P(Dtypes, WhatHasNoMeaningIsRefusedOnEveryRank) {
  run([](World& world) {
    const Group& group = world.group();
    const auto refused = [&](at::ScalarType dtype, ReduceOp op) {
      try {
        group.all_reduce(values(3, 0, dtype), op).wait();
      } catch (const ConfigError& error) {
        return std::string(error.what());
      }
      return std::string("was not refused");
    };
    EXPECT_EQ(refused(at::kComplexFloat, ReduceOp::Min),
              "[comm] all_reduce: min has no meaning for complex64");
    EXPECT_EQ(refused(at::kFloat8_e5m2, ReduceOp::BitwiseXor),
              "[comm] all_reduce: bit_xor has no meaning for float8_e5m2");
    EXPECT_EQ(refused(at::kUInt32, ReduceOp::PreMulSum),
              "[comm] all_reduce: premul has no meaning for uint32");
    EXPECT_EQ(refused(at::kFloat, static_cast<ReduceOp>(77)),
              "[comm] all_reduce: 77 is not a ReduceOp");
    // What libtorch hands about as zeros of no memory.
    EXPECT_THAT(test::message_of<ConfigError>([&] {
                  (void)group.all_gather(at::zeros({3 * group.size()}),
                                         at::_efficientzerotensor({3}, at::kFloat));
                }),
                testing::StartsWith("[comm] all_gather: a tensor of zeros has no memory"));
    group.barrier().wait();
  });
}

// "reduce_scatter" and the operation fit into what ranks compare.
TEST(DtypesOverShm, RanksThatCombineDifferentlyAreTold) {
  for (const auto& [one, other] : {std::pair{ReduceOp::BitwiseAnd, ReduceOp::BitwiseXor},
                                   std::pair{ReduceOp::Sum, ReduceOp::PreMulSum}}) {
    spawn(Ranks{"shm", 2}, [&, one = one, other = other](World& world) {
      const at::ScalarType dtype = one == ReduceOp::Sum ? at::kFloat : at::kInt;
      const std::string said = test::message_of([&] {
        at::Tensor out = at::zeros({2}, dtype);
        world.group()
            .reduce_scatter(out, at::ones({4}, dtype), world.rank() == 0 ? one : other)
            .wait();
      });
      EXPECT_NE(said.find("the ranks disagree"), std::string::npos) << said;
    });
  }
}

}  // namespace
}  // namespace lockstep::comm::dtypes
