// A child that a rank makes by fork() has no part in the rank's process group.
#include "support/fork.h"

#include <ATen/ATen.h>
#include <gmock/gmock.h>

#include <cstdlib>

#include "c10d/support.h"
#include "support/thrown.h"

namespace lockstep::test {
namespace {

using ::c10d::Backend;
using testing::AllOf;
using testing::HasSubstr;

void expect_sum(Backend& backend) {
  Tensors sum{at::ones({100000})};
  backend.allreduce(sum)->wait();
  EXPECT_EQ(sum[0][99999].item<float>(), static_cast<float>(backend.getSize()));
}

class Forks : public testing::TestWithParam<Ranks> {};
INSTANTIATE_TEST_SUITE_P(On, Forks,
                         testing::Values(Ranks{"shm", 2}, Ranks{"tcp", 3}, Ranks{"gloo", 2}),
                         name_of);

TEST_P(Forks, AChildIsRefused) {
  spawn_backends(GetParam(), [](Backend& backend, const StorePtr&) {
    expect_sum(backend);
    Tensors late{at::ones({3})}, received{at::zeros({3})};
    const int size = backend.getSize(), next = (backend.getRank() + 1) % size;
    const auto begun = backend.recv(received, (next + size - 2) % size, 1);  // and its thread
    const std::string owner = "belongs to process " + std::to_string(getpid());
    in_a_child([&] {
      const auto expect_refused = [&](const auto& call) {
        EXPECT_THAT(message_of<c10::DistBackendError>(call),
                    AllOf(HasSubstr(owner), HasSubstr("fork()")));
      };
      expect_refused([&] { backend.allreduce(late); });
      expect_refused([&] { backend.barrier(); });
      expect_refused([&] { backend.send(late, next, 1); });
      expect_refused([&] { backend.recv(late, next, 1); });
      expect_refused([&] { begun->wait(); });
      EXPECT_EQ(backend.getError(), ::c10d::ErrorType::COMM_ERROR);
      backend.abort();
      backend.shutdown();
    });
    const auto sent = backend.send(late, next, 1);
    begun->wait();
    sent->wait();
    EXPECT_EQ(received[0][2].item<float>(), 1);
    EXPECT_EQ(backend.getError(), ::c10d::ErrorType::SUCCESS);
    expect_sum(backend);
  });
}

// As os.fork() and sys.exit() of an interpreter.
TEST_P(Forks, AChildComesToItsEnd) {
  const Ranks ranks = GetParam();
  std::string path = testing::TempDir() + "c10d-XXXXXX";
  close(mkstemp(path.data()));
  spawn_bare(ranks.count,
             [&](int rank) {
               setenv("GLOO_SOCKET_IFNAME", "lo", 1);
               const auto store = file_store(path, ranks.count);
               static c10::intrusive_ptr<Backend> backend;
               static c10::intrusive_ptr<::c10d::Work> begun;
               backend = c10d_backend::make_backend(
                   c10::make_intrusive<::c10d::PrefixStore>("world", store), {rank, ranks.count});
               expect_sum(*backend);
               Tensors none{at::zeros({3})};
               begun = backend->recv(none, (rank + 1) % ranks.count, 1);
               in_a_child([] {
                 begun.reset();
                 backend.reset();
               });
               in_a_child([] {
                 c10d_backend::shut_all_down();
                 std::exit(0);
               });
               expect_sum(*backend);
               backend->shutdown();
             },
             {.backend = ranks.backend, .hosts = ranks.hosts});
  unlink(path.c_str());
}

}  // namespace
}  // namespace lockstep::test
