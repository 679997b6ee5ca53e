// One rank of this library and one of torch.distributed in one group.
#include <gmock/gmock.h>
#include <sys/wait.h>
#include <torch/torch.h>
#include <unistd.h>

#include <cstdlib>

#include "lockstep/core/error.h"
#include "support/spawn.h"
#include "support/thrown.h"

namespace lockstep::test {
namespace {

[[noreturn]] void become_python() {
  // Python opens the port itself.
  if (const char* socket = std::getenv("LOCKSTEP_STORE_FD")) close(std::atoi(socket));
  const char* script = LOCKSTEP_SOURCE_DIR "/tests/comm/gloo/python_peer.py";
  execl(LOCKSTEP_PEERS_PYTHON, LOCKSTEP_PEERS_PYTHON, script, nullptr);
  throw std::runtime_error("cannot start " LOCKSTEP_PEERS_PYTHON ": run `make bench-setup`");
}

void check(const char* what, const at::Tensor& got, const at::Tensor& want) {
  EXPECT_TRUE(got.equal(want)) << what << ": got " << got << ", want " << want;
}

// Which libtorch itself would not write outside of its mode.
at::Tensor of_inference(at::IntArrayRef sizes, float value) {
  const c10::InferenceMode inference;
  return at::full(sizes, value);
}

void exchange_nothing(const Group& group, int python) {
  const at::Tensor none = at::zeros({0});
  const std::vector<at::Tensor> nothing{none, none};
  group.all_reduce(none).wait();
  for (int root = 0; root < 2; ++root) {
    group.broadcast(none, root).wait();
    group.reduce(none, root).wait();
  }
  group.all_gather(nothing, none).wait();
  group.all_gather(none, none).wait();
  group.reduce_scatter(none, none).wait();
  group.all_to_all(none, none).wait();
  group.all_to_all(nothing, nothing).wait();
  group.send(none, python, 1).wait();
  group.recv(none, python, 2).wait();
}

void exchange_one(const Group& group, int python) {
  const at::Tensor one = at::full({3}, 7.f).as_strided({1}, {3}, 1);
  const at::Tensor t = one.clone().as_strided({1, 1}, {0, 5});
  group.all_reduce(t).wait();
  check("all_reduce of one", t, at::full({1, 1}, 10.f));
  group.reduce(one, python).wait();
  check("reduce of one", one, at::full({1}, 7.f));
  group.broadcast(t, python).wait();
  check("broadcast of one", t, at::full({1, 1}, 17.f));
  const at::Tensor both = at::zeros({9});
  const std::vector<at::Tensor> parts{both.as_strided({1}, {4}, 2), both.as_strided({}, {}, 5)};
  group.all_gather(parts, one).wait();
  check("all_gather of one", parts[python].view({1}), at::full({1}, 17.f));
  group.reduce_scatter(t, one.expand({2})).wait();
  check("reduce_scatter of one", t, at::full({1, 1}, 8.f));
  const at::Tensor two = at::zeros({2});
  group.all_to_all(two, one.expand({2})).wait();
  check("all_to_all of an expanded tensor", two[python].view({1}), at::full({1}, 5.f));
  std::vector<at::Tensor> inputs(2, at::zeros({0})), outputs(2, at::zeros({0}));
  inputs[python] = one;
  outputs[python] = t;
  group.all_to_all(outputs, inputs).wait();
  check("all_to_all of one", t, at::full({1, 1}, 5.f));
}

void talk_to_python(const Group& group) {
  const int python = 1 - group.rank();
  for (const auto dtype :
       {at::kFloat, at::kDouble, at::kHalf, at::kBFloat16, at::kInt, at::kLong, at::kByte}) {
    const at::Tensor numbers = at::arange(1, 1001, at::kLong).remainder(50).to(dtype);
    at::Tensor t = numbers * (group.rank() + 1);
    group.all_reduce(t).wait();
    check("all_reduce", t, numbers * 3);

    t = at::zeros({7}, dtype);
    group.broadcast(t, python).wait();
    check("broadcast", t, at::full({7}, 5, dtype));
    group.broadcast(t = at::full({7}, 9, dtype), group.rank()).wait();

    std::vector<at::Tensor> parts{at::zeros({3}, dtype), at::zeros({3}, dtype)};
    group.all_gather(parts, at::full({3}, group.rank() + 1, dtype)).wait();
    check("all_gather", at::stack(parts), at::tensor({1, 1, 1, 2, 2, 2}).to(dtype).view({2, 3}));
  }
  exchange_nothing(group, python);
  exchange_one(group, python);
  const at::Tensor mean = of_inference({2}, 7);
  group.all_reduce(mean, comm::ReduceOp::Average).wait();
  check("average", mean, at::full({2}, 5.f));
  at::Tensor out = of_inference({4}, 0);
  group.reduce_scatter(out, at::arange(8, at::kFloat) * (group.rank() + 1)).wait();
  check("reduce_scatter", out, at::arange(4 * group.rank(), 4 * group.rank() + 4, at::kFloat) * 3);
  group.all_to_all(out, at::full({4}, static_cast<float>(group.rank()))).wait();
  check("all_to_all", out, at::tensor({0.f, 0.f, 1.f, 1.f}));
  at::Tensor message = at::full({5}, 4.f);
  group.send(message, python, 3).wait();
  group.recv(message, python, 4).wait();
  check("recv", message, at::full({5}, 8.f));
  // A list that Gloo cannot have is refused before any part of it is sent.
  const at::Tensor first = at::full({3}, group.rank() + 1.f), wide = at::ones({2}, at::kUInt16);
  EXPECT_THAT(message_of<ConfigError>([&] {
                (void)group.all_reduce({first, wide});
              }),
              testing::HasSubstr("torch.distributed's Gloo has no uint16"));
  const at::Tensor second = at::full({2}, group.rank() + 1., at::kDouble);
  group.all_reduce({first, second, first.clone()}).wait();
  check("list of float32", first, at::full({3}, 3.f));
  check("list of float64", second, at::full({2}, 3., at::kDouble));
  group.barrier().wait();
}

// Also tells who serves the store: rank 0.
class GlooPython : public testing::TestWithParam<int> {};

TEST_P(GlooPython, SharesAGroupWithARankOfTorchDistributed) {
  spawn_bare(2,
             [](int rank) {
               if (rank != GetParam()) become_python();
               const World world = World::from_env({.python_peers = true});
               talk_to_python(world.group());
             },
             {.backend = "gloo"});
}

INSTANTIATE_TEST_SUITE_P(RankOfThisLibrary, GlooPython, testing::Values(0, 1),
                         testing::PrintToStringParamName());

}  // namespace
}  // namespace lockstep::test
