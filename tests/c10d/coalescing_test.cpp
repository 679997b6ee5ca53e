// Calls between startCoalescing() and endCoalescing().
#include <ATen/ATen.h>

#include <functional>
#include <thread>
#include <vector>

#include "c10d/support.h"

namespace lockstep::test {
namespace {

using ::c10d::Backend;

class Coalescing : public testing::TestWithParam<Ranks> {};
INSTANTIATE_TEST_SUITE_P(, Coalescing, testing::Values(Ranks{"shm", 3}, Ranks{"tcp", 2}), name_of);

TEST_P(Coalescing, IsOfWhatIsStartedTogether) {
  spawn_backends(GetParam(), [](Backend& backend, const StorePtr&) {
    const int rank = backend.getRank(), size = backend.getSize();
    std::vector<Tensors> all;
    for (int i = 0; i < 5; ++i) all.push_back({numbers(rank, 10 + i)});
    Tensors out{numbers(rank, 9)}, in{at::zeros({9})};
    backend.startCoalescing();
    for (auto& one : all) backend.allreduce(one);
    backend.send(out, (rank + 1) % size, 0);
    backend.recv(in, (rank + size - 1) % size, 0);
    const auto work = backend.endCoalescing();
    const auto future = work->getFuture();
    work->wait();
    EXPECT_TRUE(work->isSuccess());
    future->wait();
    EXPECT_EQ(all[4][0][0].item<int>(), size * (size - 1) / 2);
    EXPECT_TRUE(at::equal(in[0], numbers((rank + size - 1) % size, 9)));
  });
}

// Callbacks of futures call in other threads, and may coalesce themselves.
TEST_P(Coalescing, IsOfTheCallsOfOneThread) {
  spawn_backends(GetParam(), [](Backend& backend, const StorePtr&) {
    const int size = backend.getSize();
    Tensors first{at::ones({9})}, second{at::ones({9})}, third{at::ones({9})};
    backend.startCoalescing();
    std::thread([&] {
      backend.allreduce(first, {.asyncOp = false});
      EXPECT_EQ(first[0][0].item<int>(), size);
      backend.startCoalescing();
      backend.allreduce(third);
      backend.endCoalescing()->wait();
      EXPECT_EQ(third[0][0].item<int>(), size);
    }).join();
    backend.allreduce(second);
    const auto work = backend.endCoalescing();
    EXPECT_EQ(work->result().size(), 1);
    work->wait();
    EXPECT_EQ(second[0][0].item<int>(), size);
  });
}

// As torch's _coalescing_manager leaves it, which has no end for an exception.
TEST_P(Coalescing, GoesOnAfterAnExceptionInBetween) {
  spawn_backends(GetParam(), [](Backend& backend, const StorePtr&) {
    const int rank = backend.getRank(), size = backend.getSize();
    Tensors first{numbers(rank, 9)}, second{numbers(rank, 9)};
    backend.startCoalescing();
    backend.allreduce(first);
    EXPECT_THROW(backend.send(second, size, 0), c10::ValueError);
    // It keeps no later tensor.
    EXPECT_THROW(backend.endCoalescing(), c10::Error);
    Tensors none, wide{at::zeros({9}, at::kComplexFloat).conj()};
    std::vector<Tensors> no_lists, empty_lists(size);
    std::vector<int64_t> no_splits;
    at::Tensor &one = second[0], &view = wide[0];
    const auto bxor = ::c10d::ReduceOp::BXOR;
    const std::vector<std::function<void()>> wrong{
        [&] { backend.allreduce_coalesced(second, {{.reduceOp = bxor}}); },
        [&] { backend.allreduce(second, {.reduceOp = bxor}); },
        [&] { backend.allreduce_sparse(second); },
        [&] { backend.broadcast(none); },
        [&] { backend.reduce(second, {.reduceOp = bxor}); },
        [&] { backend.allgather(no_lists, second); },
        [&] { backend._allgather_base(view, one); },
        [&] { backend.allgather_coalesced(no_lists, second); },
        [&] { backend.allgather_coalesced(empty_lists, second); },
        [&] { backend.allgather_into_tensor_coalesced(wide, second); },
        [&] { backend.allgather_into_tensor_coalesced(none, second); },
        [&] { backend.gather(no_lists, none); },
        [&] { backend.scatter(none, no_lists); },
        [&] { backend.reduce_scatter(second, no_lists); },
        [&] { backend._reduce_scatter_base(one, view, {.reduceOp = bxor}); },
        [&] { backend.reduce_scatter_tensor_coalesced(second, none); },
        [&] { backend.alltoall_base(view, one, no_splits, no_splits); },
        [&] { backend.alltoall(wide, second); },
    };
    for (size_t call = 0; call < wrong.size(); ++call) {
      backend.startCoalescing();
      EXPECT_THROW(wrong[call](), c10::ValueError) << call;
      EXPECT_THROW(backend.endCoalescing(), c10::Error) << call;
    }
    backend.startCoalescing();
    backend.allreduce(second);
    backend.endCoalescing()->wait();
    for (const auto& sum : {first, second}) {
      EXPECT_EQ(sum[0][0].item<int>(), size * (size - 1) / 2);
    }
  });
}

}  // namespace
}  // namespace lockstep::test
