// Messages by tag in any order and from any rank.
#include <ATen/ATen.h>

#include <cstring>

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
    // Of one size in bytes, with the head and after it.
    for (const int64_t count : {3, 5000}) {
      Tensors floats{at::ones({count})}, ints{at::zeros({count}, at::kInt)};
      if (backend.getRank() == 0) {
        backend.send(floats, 1, 4)->wait();
      } else {
        const auto work = backend.recv(ints, 0, 4);
        try {
          work->wait();
          ADD_FAILURE() << "a message of another dtype was taken";
        } catch (const c10::DistBackendError& error) {
          EXPECT_NE(std::string(error.what())
                        .find("sent float32 with tag 4, and rank 1 receives "
                              "int32"),
                    std::string::npos)
              << error.what();
        }
        EXPECT_EQ(ints[0].sum().item<int>(), 0);
      }
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

// A short one is over before its receiver has come, and so is the head of a long one.
TEST_P(Messages, WhoseRestNobodyReceivesEndAtTheDeadline) {
  using std::chrono::milliseconds;
  spawn_backends(GetParam(), [](Backend& backend, const StorePtr& store) {
    backend.barrier()->wait();
    if (backend.getRank() == 0) {
      backend.setTimeout(milliseconds(700));
      Tensors large{at::ones({300000})};
      const auto work = backend.send(large, 1, 1);
      EXPECT_THROW(work->wait(), c10::DistBackendError);
      store->set("over", "");
    } else {
      store->wait({"over"});
    }
  });
}

TEST_P(Messages, WhoseRestDoesNotComeEndTheGroup) {
  using std::chrono::milliseconds;
  const Ranks ranks = GetParam();
  std::string path = testing::TempDir() + "c10d-XXXXXX";
  close(mkstemp(path.data()));
  spawn_bare(ranks.count,
             [&](int rank) {
               setenv("GLOO_SOCKET_IFNAME", "lo", 1);
               const auto store = file_store(path, ranks.count);
               const auto own = c10::make_intrusive<::c10d::PrefixStore>("world", store);
               if (rank == 0) {
                 const auto backend = c10d_backend::make_backend(own, {0, ranks.count});
                 store->wait({"begun"});
                 backend->setTimeout(milliseconds(500));
                 Tensors one{at::zeros({300000})};
                 const auto work = backend->recv(one, 1, 3);
                 EXPECT_THROW(work->wait(), c10::DistBackendError);
                 EXPECT_THROW(backend->barrier()->wait(), c10::DistBackendError);  // nor the group
                 store->set("over", "");
                 return;
               }
               const comm::Group group = comm::join_group(own, {rank, ranks.count});
               if (rank == 1) {
                 at::Tensor head = at::zeros({512}, at::kByte);
                 const int64_t bytes = 1200000;
                 const int32_t tag = 3;
                 std::memcpy(head.data_ptr(), &bytes, sizeof bytes);
                 std::memcpy(head.data_ptr<uint8_t>() + sizeof bytes, &tag, sizeof tag);
                 comm::Work sent = group.send(head, 0);
                 store->set("begun", "");
                 sent.wait();
               }
               store->wait({"over"});
             },
             {.backend = ranks.backend, .hosts = ranks.hosts});
  unlink(path.c_str());
}

TEST_P(Messages, TakeViewsAsTheyAre) {
  spawn_backends(GetParam(), [](Backend& backend, const StorePtr&) {
    const int rank = backend.getRank(), size = backend.getSize();
    const int to = (rank + 1) % size, from = (rank + size - 1) % size;
    int tag = 0;
    for (const int64_t count : {3, 5000}) {
      const at::Tensor numbers = at::arange(count, at::kFloat) + rank,
                       expected = at::arange(count, at::kFloat) + from;
      const at::Tensor pairs = at::complex(numbers, numbers + 1);
      const auto exchange = [&](const at::Tensor& out, const at::Tensor& in) {
        Tensors outs{out}, ins{in};
        const auto sent = backend.send(outs, to, ++tag);
        backend.recv(ins, from, tag)->wait();
        sent->wait();
      };
      at::Tensor plain = at::zeros({count}), negative = at::zeros({count});
      exchange(at::_neg_view(numbers), plain);
      EXPECT_TRUE(at::equal(plain, -expected));
      exchange(at::imag(pairs.conj()), plain);
      EXPECT_TRUE(at::equal(plain, -(expected + 1)));
      exchange(numbers, at::_neg_view(negative));
      EXPECT_TRUE(at::equal(negative, -expected));
      at::Tensor conjugate = at::zeros_like(pairs);
      exchange(pairs, conjugate.conj());
      EXPECT_TRUE(at::equal(conjugate, at::complex(expected, -(expected + 1))));
    }
    // Elements that share memory have no room for a message.
    Tensors out{at::ones({4})}, in{at::zeros({1}).expand({4})};
    const auto sent = backend.send(out, to, 99);
    EXPECT_THROW(backend.recv(in, from, 99)->wait(), c10::Error);
    sent->wait();
    backend.barrier()->wait();
  });
}

// libtorch writes to none outside of an InferenceMode, and other threads are in none.
TEST_P(Messages, ComeIntoTensorsOfAnInferenceMode) {
  spawn_backends(GetParam(), [](Backend& backend, const StorePtr&) {
    const int rank = backend.getRank(), size = backend.getSize();
    const auto zeros = [] {
      const c10::InferenceMode inference;
      return at::zeros({4, 6}, at::kInt);
    };
    Tensors out{message(rank, 0, 8).view({4, 2})}, in{zeros().narrow(1, 0, 2)};
    const auto sent = backend.send(out, (rank + 1) % size, 0);
    const int from = (rank + size - 1) % size;
    backend.recv(in, from, 0)->wait();
    EXPECT_TRUE(at::equal(in[0], message(from, 0, 8).view({4, 2})));
    sent->wait();
    backend.barrier()->wait();
  });
}

TEST(MonitoredBarrier, NamesWhoHasNotCome) {
  spawn_backends(3, [](Backend& backend, const StorePtr&) {
    using std::chrono::milliseconds;
    backend.monitoredBarrier({}, false);
    if (backend.getRank() == 0) {
      try {
        backend.monitoredBarrier({.timeout = milliseconds(1500)}, true);  // rank 1 comes within it
        ADD_FAILURE() << "nobody was missed";
      } catch (const c10::Error& error) {
        EXPECT_NE(std::string(error.what()).find("Ranks 2 failed to pass"), std::string::npos)
            << error.what();
      }
    } else if (backend.getRank() == 1) {
      EXPECT_THROW(backend.monitoredBarrier({.timeout = milliseconds(2000)}, true), c10::Error);
    }
    backend.barrier()->wait();  // the group has outlived it
  });
}

}  // namespace
}  // namespace lockstep::test
