// The same model, seed and data in C++ and in Python's DistributedDataParallel.
#include <fmt/format.h>

#include <cstdio>
#include <sstream>

#include "lockstep/parallel/fused_adam.h"
#include "parallel/reference.h"
#include "support/spawn.h"

namespace lockstep::test {
namespace {

constexpr int kSteps = 50;

// What the program wrote to standard output; fails the test unless it ended well.
std::string output_of(const std::string& command) {
  std::string text;
  FILE* pipe = popen(command.c_str(), "r");
  char chunk[4096];
  while (const size_t n = fread(chunk, 1, sizeof chunk, pipe)) text.append(chunk, n);
  EXPECT_EQ(pclose(pipe), 0) << command;
  return text;
}

uint64_t fnv1a(const std::vector<at::Tensor>& parameters) {
  uint64_t value = 0xcbf29ce484222325;
  for (const auto& parameter : parameters) {
    const auto* bytes = static_cast<const uint8_t*>(parameter.const_data_ptr());
    for (size_t i = 0; i < parameter.nbytes(); ++i) value = (value ^ bytes[i]) * 0x100000001b3;
  }
  return value;
}

std::unique_ptr<torch::optim::Optimizer> make_optimizer(const std::string& name,
                                                        std::vector<at::Tensor> parameters) {
  using namespace torch::optim;
  if (name == "sgd") return std::make_unique<SGD>(parameters, SGDOptions(0.1).momentum(0.9));
  if (name == "adam") return std::make_unique<FusedAdam>(parameters, AdamOptions(1e-2));
  return std::make_unique<FusedAdamW>(parameters, AdamWOptions(1e-2).weight_decay(0.1));
}

class Python : public ::testing::TestWithParam<std::string> {};
INSTANTIATE_TEST_SUITE_P(Optimizer, Python, ::testing::Values("sgd", "adam", "adamw"),
                         [](const auto& test) { return test.param; });

// On one thread the forward, backward and update kernels are the same code, and halving a sum of
// two is exact in either order, so that the runs are the same bits, far within the 1e-6 asked of
// losses.
TEST_P(Python, B16_TwoRanksTrainToTheSameBits) {
  const std::string peer =
      output_of(fmt::format("{} {}/tests/parallel/python_peer.py {}", LOCKSTEP_PEERS_PYTHON,
                            LOCKSTEP_SOURCE_DIR, GetParam()));
  spawn(2, [&](World& world) {
    at::set_num_threads(1);
    std::istringstream lines(peer);
    uint64_t initial = 0, last = 0;
    lines >> initial;
    Mlp net;
    ASSERT_EQ(fnv1a(net.parameters()), initial);
    Ddp ddp(net, world.group());
    const auto optimizer = make_optimizer(GetParam(), net.parameters());
    for (int step = 0; step < kSteps; ++step) {
      double theirs[2] = {};
      lines >> theirs[0] >> theirs[1];
      ddp.zero_grad();
      const auto loss = square_loss(net, world.rank(), step);
      loss.backward();
      optimizer->step();
      EXPECT_NEAR(loss.item<double>(), theirs[world.rank()], 1e-6) << "step " << step;
    }
    lines >> last;
    ASSERT_TRUE(lines);
    EXPECT_EQ(fnv1a(net.parameters()), last);
  });
}

}  // namespace
}  // namespace lockstep::test
