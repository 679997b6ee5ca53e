// c10d's collectives, through c10d::Backend, against what one process computes.
#include <ATen/ATen.h>
#include <gmock/gmock.h>

#include <optional>

#include "c10d/support.h"

namespace lockstep::test {
namespace {

using ::c10d::Backend;
using ::c10d::ReduceOp;

void expect_equal(const char* what, const at::Tensor& got, const at::Tensor& want) {
  EXPECT_TRUE(at::equal(got, want)) << what << ": got " << got << ", want " << want;
}

at::Tensor sum_of(int ranks, int64_t count, at::ScalarType dtype = at::kFloat) {
  at::Tensor sum = at::zeros({count}, dtype);
  for (int r = 0; r < ranks; ++r) sum.add_(numbers(r, count, dtype));
  return sum;
}

class Collectives : public testing::TestWithParam<Ranks> {};
INSTANTIATE_TEST_SUITE_P(, Collectives,
                         testing::Values(Ranks{"shm", 2}, Ranks{"shm", 3}, Ranks{"tcp", 2},
                                         Ranks{"gloo", 2}, Ranks{"auto", 4, {0, 0, 1, 1}}),
                         name_of);

TEST_P(Collectives, GiveWhatOneProcessComputes) {
  spawn_backends(GetParam(), [](Backend& backend, const StorePtr&) {
    const int rank = backend.getRank(), size = backend.getSize();
    for (const auto dtype : {at::kFloat, at::kLong, at::kBFloat16}) {
      Tensors one{numbers(rank, 10, dtype)};
      backend.allreduce(one)->wait();
      expect_equal("allreduce", one[0], sum_of(size, 10, dtype));
    }
    Tensors one{numbers(rank, 5)};
    backend.broadcast(one, {.rootRank = size - 1})->wait();
    expect_equal("broadcast", one[0], numbers(size - 1, 5));
    one[0] = numbers(rank, 5);
    backend.reduce(one, {.rootRank = 1})->wait();
    if (rank == 1) expect_equal("reduce", one[0], sum_of(size, 5));

    Tensors in{numbers(rank, 3)};
    std::vector<Tensors> lists(1);
    for (int r = 0; r < size; ++r) lists[0].push_back(at::zeros({3}));
    backend.allgather(lists, in)->wait();
    for (int r = 0; r < size; ++r) expect_equal("allgather", lists[0][r], numbers(r, 3));
    at::Tensor all = at::zeros({size, 3});
    backend._allgather_base(all, in[0])->wait();
    for (int r = 0; r < size; ++r) expect_equal("all_gather_single", all[r], numbers(r, 3));

    at::Tensor wide = numbers(rank, 2 * size), part = at::zeros({2});
    backend._reduce_scatter_base(part, wide)->wait();
    expect_equal("reduce_scatter", part, sum_of(size, 2 * size).narrow(0, 2 * rank, 2));
    Tensors parts{at::zeros({2})};
    std::vector<Tensors> cut{wide.split(2)};
    backend.reduce_scatter(parts, cut)->wait();
    expect_equal("reduce_scatter of a list", parts[0], part);

    at::Tensor there = at::zeros({size}), here = at::full({size}, float(rank));
    std::vector<int64_t> equal;
    backend.alltoall_base(there, here, equal, equal)->wait();
    expect_equal("alltoall", there, at::arange(size, at::kFloat));

    std::vector<Tensors> gathered;
    if (rank == 0) gathered = lists;
    backend.gather(gathered, in, {.rootRank = 0})->wait();
    if (rank == 0) expect_equal("gather", gathered[0][1], numbers(1, 3));
    Tensors out{at::zeros({3})};
    std::vector<Tensors> given;
    if (rank == 1) given.push_back(lists[0]);
    backend.scatter(out, given, {.rootRank = 1})->wait();
    expect_equal("scatter", out[0], numbers(rank, 3));
    backend.barrier()->wait();
  });
}

// What is contiguous on one rank need not be on another.
TEST_P(Collectives, CarryViewsOfEachDtype) {
  spawn_backends(GetParam(), [](Backend& backend, const StorePtr&) {
    const int rank = backend.getRank(), size = backend.getSize();
    for (const at::ScalarType dtype : {at::kFloat, at::kUInt16, at::kUInt64, at::kFloat8_e5m2}) {
      const auto values = [&](int r) { return numbers(r, 6).view({2, 3}).to(dtype); };
      Tensors in{rank == 0 ? values(0) : values(rank).t().contiguous().t()};
      std::vector<Tensors> out(1);
      for (int r = 0; r < size; ++r) {
        out[0].push_back(rank == 1 ? at::zeros({2, 3}).to(dtype) : at::zeros({3, 2}).to(dtype).t());
      }
      backend.allgather(out, in)->wait();
      for (int r = 0; r < size; ++r)
        expect_equal(c10::toString(dtype), out[0][r].to(at::kFloat), numbers(r, 6).view({2, 3}));
      backend.broadcast(in)->wait();
      expect_equal("broadcast", in[0].to(at::kFloat), numbers(0, 6).view({2, 3}));
    }
  });
}

TEST_P(Collectives, ReduceInEveryWay) {
  spawn_backends(GetParam(), [](Backend& backend, const StorePtr&) {
    const int rank = backend.getRank(), size = backend.getSize();
    const auto reduced = [&](at::Tensor mine, const ReduceOp& op) {
      Tensors one{std::move(mine)};
      backend.allreduce(one, {.reduceOp = op})->wait();
      return one[0];
    };
    at::Tensor xored = at::zeros({40}, at::kInt);
    for (int r = 0; r < size; ++r) xored.bitwise_xor_(numbers(r, 40, at::kInt));
    expect_equal("BXOR", reduced(numbers(rank, 40, at::kInt), ReduceOp::BXOR), xored);
    expect_equal("MAX", reduced(numbers(rank, 4), ReduceOp::MAX), numbers(size - 1, 4));
    expect_equal("PREMUL_SUM", reduced(numbers(rank, 4), ::c10d::makePreMulSum(0.5)),
                 sum_of(size, 4) * 0.5);
    expect_equal(
        "PREMUL_SUM of float8",
        reduced(numbers(rank, 2, at::kFloat8_e5m2), ::c10d::makePreMulSum(2.0)).to(at::kFloat),
        sum_of(size, 2) * 2);
    const at::Tensor complex = at::complex(numbers(rank, 4), -numbers(rank, 4));
    expect_equal("complex", reduced(complex.clone(), ReduceOp::SUM),
                 at::complex(sum_of(size, 4), -sum_of(size, 4)));
    expect_equal("uint16", reduced(numbers(rank, 4, at::kUInt16), ReduceOp::SUM).to(at::kLong),
                 sum_of(size, 4, at::kLong));
    const auto high = at::full({4}, 65530, at::kInt).to(at::kUInt16);  // negative as a signed one
    expect_equal("MAX of uint16",
                 reduced(rank == 0 ? high.clone() : numbers(rank, 4, at::kUInt16), ReduceOp::MAX)
                     .to(at::kLong),
                 high.to(at::kLong));
    EXPECT_THROW(reduced(complex, ReduceOp::MAX), c10::ValueError);
    EXPECT_THROW(reduced(numbers(rank, 4), ReduceOp::BXOR), c10::ValueError);
    // The group has not noticed.
    expect_equal("SUM", reduced(numbers(rank, 4), ReduceOp::SUM), sum_of(size, 4));

    at::Tensor part = at::zeros({1}, at::kInt), wide = at::full({size}, rank + 1, at::kInt);
    backend._reduce_scatter_base(part, wide, {.reduceOp = ReduceOp::BXOR})->wait();
    int expected = 0;
    for (int r = 0; r < size; ++r) expected ^= r + 1;
    EXPECT_EQ(part.item<int>(), expected);
  });
}

// Gloo takes several tensors in a call, each as if it were another rank's.
TEST(SeveralTensors, CountAsRanks) {
  spawn_backends(2, [](Backend& backend, const StorePtr&) {
    const int rank = backend.getRank();
    Tensors two{at::full({3}, rank + 1.f), at::full({3}, 10.f)};
    backend.allreduce(two)->wait();
    for (const at::Tensor& tensor : two) expect_equal("allreduce", tensor, at::full({3}, 23.f));
    for (const auto op : {ReduceOp::SUM, ReduceOp::MAX}) {
      {
        const c10::InferenceMode inference;
        two = {at::full({3}, rank + 1.f), at::full({3}, 10.f)};
      }
      backend.allreduce(two, {.reduceOp = op})->wait();
      const c10::InferenceMode inference;
      for (const at::Tensor& tensor : two)
        expect_equal("an InferenceMode's", tensor,
                     at::full({3}, op == ReduceOp::SUM ? 23.f : 10.f));
    }
    two = {at::full({3}, float(rank)), at::full({3}, 5.f + rank)};
    backend.broadcast(two, {.rootRank = 1, .rootTensor = 1})->wait();
    for (const at::Tensor& tensor : two) expect_equal("broadcast", tensor, at::full({3}, 6.f));
    Tensors in{at::full({1}, float(rank)), at::full({1}, rank + 10.f)};
    std::vector<Tensors> lists(2);
    for (auto& list : lists) {
      for (int i = 0; i < 4; ++i) list.push_back(at::zeros({1}));
    }
    backend.allgather(lists, in)->wait();
    for (const auto& list : lists)
      expect_equal("allgather", at::cat(list), at::tensor({0.f, 10.f, 1.f, 11.f}));
    Tensors three{at::full({2}, 1.f), at::full({3}, 2, at::kInt), at::full({1}, 3.)};
    backend.allreduce_coalesced(three)->wait();
    expect_equal("allreduce_coalesced", three[1], at::full({3}, 4, at::kInt));
    expect_equal("allreduce_coalesced", three[2], at::full({1}, 6.));
  });
}

TEST(SparseTensors, AreSummed) {
  spawn_backends(2, [](Backend& backend, const StorePtr&) {
    const int rank = backend.getRank();
    // Rank 0 has rows 0 and 2, rank 1 has row 2 twice; then rank 1 has none, and the tensors are an
    // InferenceMode's.
    for (const bool empty : {false, true}) {
      const bool none = empty && rank == 1;
      const at::Tensor indices =
          none ? at::zeros({1, 0}, at::kLong) : at::tensor({2 * rank, 2}, at::kLong).view({1, 2});
      const at::Tensor values = at::ones({none ? 0 : 2, 3}) * (rank + 1);
      std::optional<c10::InferenceMode> inference(empty);
      Tensors one{at::sparse_coo_tensor(indices, values, {4, 3})};
      inference.reset();
      backend.allreduce(one)->wait();
      inference.emplace(empty);
      at::Tensor want = at::zeros({4, 3});
      want[0] = 1;
      want[2] = empty ? 1 : 5;
      expect_equal("sparse", one[0].to_dense(), want);
    }
  });
}

// The sum had an index outside of the smaller one.
TEST(SparseTensors, OfDifferentSizesAreRefusedOnAllRanks) {
  spawn_backends(2, [](Backend& backend, const StorePtr&) {
    const int rank = backend.getRank();
    const auto sum = [&](const at::Tensor& row, int64_t size) {
      Tensors one{at::sparse_coo_tensor(row.view({1, 1}), at::ones({1}), {size})};
      backend.allreduce(one)->wait();
      return one[0].to_dense();
    };
    try {
      sum(at::tensor({2 + 2 * rank}, at::kLong), 3 + 2 * rank);
      ADD_FAILURE() << "was summed";
    } catch (const c10::ValueError& error) {
      EXPECT_THAT(error.what(), testing::HasSubstr("rank 0 has one of sizes [3]"));
      EXPECT_THAT(error.what(), testing::HasSubstr("rank 1 one of [5]"));
    }
    expect_equal("after it", sum(at::tensor({1}, at::kLong), 3), at::tensor({0.F, 2.F, 0.F}));
  });
}

// Memory of a conjugate that libtorch has put off holds other numbers than its elements.
TEST_P(Collectives, TakeConjugatesThatArePutOff) {
  spawn_backends(GetParam(), [](Backend& backend, const StorePtr&) {
    const int rank = backend.getRank(), size = backend.getSize();
    const auto put_off = [](int of) { return at::complex(numbers(of, 3), numbers(of, 3)).conj(); };
    const auto plain = [&](int of) { return put_off(of).resolve_conj(); };
    Tensors root{rank == 0 ? put_off(0) : plain(rank)};
    backend.broadcast(root)->wait();
    expect_equal("broadcast", root[0], plain(0));
    at::Tensor all = at::zeros({size, 3}, at::kComplexFloat), in = put_off(rank);
    backend._allgather_base(all, in)->wait();
    for (int r = 0; r < size; ++r) expect_equal("all_gather", all[r], plain(r));
    Tensors sum{rank == 0 ? plain(0) : put_off(rank)};
    backend.reduce(sum)->wait();
    if (rank == 0) expect_equal("reduce", sum[0], at::complex(sum_of(size, 3), -sum_of(size, 3)));

    // None is written to, and the group has not noticed.
    Tensors out{put_off(rank)};
    if (rank != 0) {
      EXPECT_THROW(backend.broadcast(out), c10::ValueError);
    }
    EXPECT_THROW(backend.allreduce(out)->wait(), c10::ValueError);
    if (rank != 0) out = {plain(rank)};
    backend.broadcast(out)->wait();
    expect_equal("broadcast", out[0], plain(0));
  });
}

}  // namespace
}  // namespace lockstep::test
