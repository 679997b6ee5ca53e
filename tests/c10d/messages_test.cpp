// Messages by tag in any order and from any rank.
#include <ATen/ATen.h>

#include "c10d/support.h"

namespace lockstep::test {
namespace {

using ::c10d::Backend;

class Messages : public testing::TestWithParam<Ranks> {};
INSTANTIATE_TEST_SUITE_P(, Messages,
                         testing::Values(Ranks{"shm", 2}, Ranks{"shm", 3}, Ranks{"tcp", 3},
                                         Ranks{"gloo", 2}, Ranks{"auto", 3, {0, 0, 1}}),
                         name_of);

at::Tensor message(int from, int tag, int64_t count) {
  return at::arange(count, at::kInt) + 1000 * from + 100000 * tag;
}

constexpr int64_t kSizes[] = {0, 1, 124, 125, 100000};  // 496 bytes go with the head

TEST_P(Messages, ComeByTagInAnyOrder) {
  spawn_backends(GetParam(), [](Backend& backend, const StorePtr&) {
    const int rank = backend.getRank(), size = backend.getSize();
    const int to = (rank + 1) % size, from = (rank + size - 1) % size;
    std::vector<c10::intrusive_ptr<::c10d::Work>> works;
    std::vector<Tensors> kept;
    for (int tag = 0; tag < 5; ++tag) {
      kept.push_back({message(rank, tag, kSizes[tag])});
      works.push_back(backend.send(kept.back(), to, tag));
    }
    for (int tag = 4; tag >= 0; --tag) {
      Tensors one{at::zeros({kSizes[tag]}, at::kInt)};
      backend.recv(one, from, tag)->wait();
      EXPECT_TRUE(at::equal(one[0], message(from, tag, kSizes[tag]))) << "tag " << tag;
    }
    for (const auto& work : works) work->wait();
    backend.barrier()->wait();
  });
}

TEST_P(Messages, ComeFromAnyRank) {
  spawn_backends(GetParam(), [](Backend& backend, const StorePtr&) {
    const int rank = backend.getRank(), size = backend.getSize();
    if (rank != 0) {
      Tensors small{message(rank, 3, 7)}, large{message(rank, 4, 50000)};
      const auto first = backend.send(small, 0, 3), second = backend.send(large, 0, 4);
      first->wait();
      second->wait();
    } else {
      for (const auto& [tag, count] : {std::pair{4, 50000}, std::pair{3, 7}}) {
        std::vector<bool> came(size);
        for (int i = 1; i < size; ++i) {
          Tensors one{at::zeros({count}, at::kInt)};
          const auto work = backend.recvAnysource(one, tag);
          work->wait();
          const int from = work->sourceRank();
          EXPECT_FALSE(came[from]) << from;
          came[from] = true;
          EXPECT_TRUE(at::equal(one[0], message(from, tag, count)));
        }
      }
    }
    backend.barrier()->wait();
  });
}

TEST(MessageSizes, MustAgreeAndLaterOnesCome) {
  spawn_backends(2, [](Backend& backend, const StorePtr&) {
    Tensors right{message(0, 1, 1000)}, large{at::zeros({5000})}, small{at::zeros({2})};
    if (backend.getRank() == 0) {
      for (auto* one : {&large, &small, &right}) backend.send(*one, 1, 1)->wait();
    } else {
      Tensors one{at::zeros({1000}, at::kInt)};
      for (int i = 0; i < 2; ++i) {
        try {
          backend.recv(one, 0, 1)->wait();
          ADD_FAILURE() << "a message of another size was taken";
        } catch (const c10::DistBackendError& error) {
          EXPECT_NE(std::string(error.what()).find("has room for 4000"), std::string::npos)
              << error.what();
        }
      }
      backend.recv(one, 0, 1)->wait();
      EXPECT_TRUE(at::equal(one[0], right[0]));
    }
    // Into a tensor that is not contiguous.
    Tensors column{at::zeros({3, 2}, at::kInt).select(1, 0)}, three{message(0, 0, 3)};
    if (backend.getRank() == 0) backend.send(three, 1, 9)->wait();
    if (backend.getRank() == 1) {
      backend.recv(column, 0, 9)->wait();
      EXPECT_TRUE(at::equal(column[0], three[0]));
    }
    backend.barrier()->wait();
  });
}

TEST(MonitoredBarrier, NamesWhoHasNotCome) {
  spawn_backends(3, [](Backend& backend, const StorePtr&) {
    using std::chrono::milliseconds;
    backend.monitoredBarrier({}, false);
    if (backend.getRank() == 0) {
      try {
        backend.monitoredBarrier({.timeout = milliseconds(300)}, true);
        ADD_FAILURE() << "nobody was missed";
      } catch (const c10::Error& error) {
        EXPECT_NE(std::string(error.what()).find("Ranks 2 failed to pass"), std::string::npos)
            << error.what();
      }
    } else if (backend.getRank() == 1) {
      EXPECT_THROW(backend.monitoredBarrier({.timeout = milliseconds(600)}, true), c10::Error);
    }
    backend.barrier()->wait();  // the group has outlived it
  });
}

}  // namespace
}  // namespace lockstep::test
