// A small training job in which one thing goes wrong: what tests/system/faults_test.py and
// tests/system/soak.py run.
//
//   fault_trainer STEPS [RANKS STEP PLACE KIND]...
//
// At step STEP and place PLACE the ranks RANKS ("1" or "1,2") do KIND: the first four words in the
// first attempt, the next four in the second, and so on. With KIND outside they do nothing, and
// the attempt trains until somebody ends it. Every rank says on stdout when it does, and when
// it learns of somebody else's failure: "fault NS", "known NS" (CLOCK_MONOTONIC).
#include <lockstep/core/flight.h>
#include <lockstep/lockstep.h>
#include <torch/torch.h>
#include <unistd.h>

#include <chrono>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <thread>

namespace {

// CLOCK_MONOTONIC, as the launcher reads it.
uint64_t now_ns() {
  return static_cast<uint64_t>(
      std::chrono::nanoseconds(std::chrono::steady_clock::now().time_since_epoch()).count());
}

struct Fault {
  std::string ranks;
  long step = -1;
  std::string place, kind;
};

void say(const char* what) {
  std::printf("%s %lu\n", what, now_ns());
  std::fflush(stdout);
}

class Trouble {
 public:
  Trouble(Fault fault, const std::string& rank)
      : fault_(std::move(fault)),
        mine_(("," + fault_.ranks + ",").find("," + rank + ",") != std::string::npos) {}

  // Does it, when this is the place. The collectives go on as others' do, so that a mismatch meets
  // them.
  void at(const char* place, long step, const lockstep::Group* group = nullptr) const {
    if (!mine_ || step != fault_.step || fault_.place != place) return;
    say("fault");
    const std::string& kind = fault_.kind;
    if (kind == "kill") raise(SIGKILL);
    if (kind == "stop") raise(SIGSTOP);
    if (kind == "segv") std::raise(SIGSEGV);
    if (kind == "abort") std::abort();
    if (kind == "exit7") _exit(7);
    if (kind == "exit0") std::exit(0);
    if (kind == "throw") throw lockstep::DataError("[trainer] row 17 is damaged");
    if (kind == "slow") std::this_thread::sleep_for(std::chrono::milliseconds(300));
    if (kind == "fork") fork_a_child();
    if (group == nullptr) return;
    const auto ones = [&](int64_t count, torch::ScalarType dtype) {
      return torch::ones({count}, torch::TensorOptions(device_).dtype(dtype));
    };
    if (kind == "count") group->all_reduce(ones(5, torch::kFloat)).wait();
    if (kind == "dtype") group->all_reduce(ones(4, torch::kLong)).wait();
    if (kind == "root") group->broadcast(ones(4, torch::kFloat), 1).wait();
    if (kind == "collective") group->barrier().wait();
  }
  // Where the collectives' tensors are.
  void on(torch::Device device) { device_ = device; }
  // Whether this rank leaves out a collective here.
  bool skips(long step) const { return mine_ && step == fault_.step && fault_.kind == "skip"; }

 private:
  static void fork_a_child() {
    if (fork() == 0) {
      for (;;) pause();
    }
  }

  Fault fault_;
  bool mine_;
  torch::Device device_ = torch::kCPU;
};

struct NetImpl : torch::nn::Module {
  torch::nn::Linear first{nullptr}, second{nullptr};
  NetImpl() {
    // Two buckets: the first takes 1 MiB.
    first = register_module("first", torch::nn::Linear(64, 4096));
    second = register_module("second", torch::nn::Linear(4096, 8));
  }
  torch::Tensor forward(const torch::Tensor& x) { return second(torch::relu(first(x))); }
};
TORCH_MODULE(Net);

// A frame of its own, which the failure page has to name.
[[gnu::noinline]] void train(long steps, const Fault& fault) {
  const char* env_rank = std::getenv("RANK");
  Trouble trouble(fault, env_rank == nullptr ? "0" : env_rank);
  trouble.at("rendezvous", 0);
  const auto world = lockstep::World::from_env();
  trouble.on(world.device());
  torch::manual_seed(1);
  Net net;
  net->to(world.device());
  lockstep::Ddp ddp(*net, world.group());
  torch::optim::SGD sgd(net->parameters(), 1e-3);
  long step = 0;
  net->second->weight.register_hook([&](const torch::Tensor& gradient) {
    trouble.at("backward", step);
    return gradient;
  });
  if (world.is_main()) say("training");
  for (; step < steps || fault.kind == "outside"; ++step) {
    trouble.at("loader", step);
    const torch::Tensor x = torch::randn({16, 64}, world.device()),
                        y = torch::randn({16, 8}, world.device());
    ddp.zero_grad();
    trouble.at("forward", step);
    const torch::Tensor loss = torch::mse_loss(net->forward(x), y);
    loss.backward();
    trouble.at("optimizer", step);
    sgd.step();
    trouble.at("barrier", step, &world.group());
    torch::Tensor sum = torch::ones({4}, world.device());
    if (!trouble.skips(step))
      world.group().all_reduce(sum, lockstep::ReduceOp::Sum, {.label = "metrics"}).wait();
    if (step % 10 == 9) world.group().barrier().wait();
  }
  trouble.at("shutdown", 0);
  world.group().barrier().wait();
  if (world.is_main()) say("done");
}

int fail(const std::exception& error, lockstep::flight::Blame blame) {
  lockstep::flight::report_failure(error.what(), blame);
  std::fprintf(stderr, "error: %s\n", error.what());
  return blame == lockstep::flight::Blame::Own ? 3 : 1;
}

}  // namespace

int main(int argc, char** argv) {
  const char* count = std::getenv("TORCHELASTIC_RESTART_COUNT");
  const int first = 2 + 4 * (count == nullptr ? 0 : std::atoi(count));
  Fault fault;
  if (first + 3 < argc)
    fault = {argv[first], std::atol(argv[first + 1]), argv[first + 2], argv[first + 3]};
  try {
    train(argc > 1 ? std::atol(argv[1]) : 100, fault);
    return 0;
  } catch (const lockstep::CommError& error) {
    say("known");
    return fail(error, lockstep::flight::Blame::Peer);
  } catch (const std::exception& error) {
    return fail(error, lockstep::flight::Blame::Own);
  }
}
