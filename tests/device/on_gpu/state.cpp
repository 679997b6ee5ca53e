// What is kept and brought: checkpoints, generators, batches.
#include <stdlib.h>

#include <cerrno>
#include <filesystem>
#include <system_error>

#include "lockstep/checkpoint/checkpointer.h"
#include "lockstep/data/loader.h"
#include "lockstep/data/tensor_dataset.h"
#include "lockstep/parallel/ddp.h"
#include "lockstep/parallel/stateful.h"
#include "on_gpu/checks.h"

namespace lockstep::on_gpu {
namespace {

namespace fs = std::filesystem;

// One for all ranks, removed at the end.
class SharedFolder {
 public:
  explicit SharedFolder(const World& world) : world_(world) {
    std::string path = (fs::temp_directory_path() / "on-gpu-XXXXXX").string();
    if (world.is_main() && mkdtemp(path.data()) == nullptr)
      throw std::system_error(errno, std::generic_category(), "mkdtemp " + path);
    path_ = world.group().broadcast_bytes(path);
  }
  ~SharedFolder() {
    std::error_code ignored;
    if (world_.is_main()) fs::remove_all(path_, ignored);
  }
  SharedFolder(const SharedFolder&) = delete;
  SharedFolder& operator=(const SharedFolder&) = delete;
  const std::string& path() const { return path_; }

 private:
  const World& world_;
  std::string path_;
};

struct Run {
  explicit Run(const World& world)
      : net(small_net(world)),
        adam(net->parameters(), torch::optim::AdamWOptions(1e-2)),
        ddp(net, world.group()) {}

  void train(const World& world, int first, int last) {
    for (int step = first; step < last; ++step) {
      ddp.zero_grad();
      net->forward(batch_of(world, world.rank(), step)).square().mean().backward();
      adam.step();
    }
  }

  torch::nn::Sequential net;
  torch::optim::AdamW adam;
  Ddp ddp;
};

// The training continues while what it had is written; a run that starts from it ends alike.
void checkpoint(const World& world, bool async) {
  const SharedFolder folder(world);
  Run run(world);
  {
    Checkpointer checkpoints(world.group(), folder.path(), {.async = async});
    checkpoints.track("net", run.net);
    checkpoints.track("adam", run.adam);
    run.train(world, 0, 4);
    checkpoints.save(4);
    run.train(world, 4, kSteps);
    checkpoints.finish();
  }
  Run again(world);
  Checkpointer checkpoints(world.group(), folder.path());
  checkpoints.track("net", again.net);
  checkpoints.track("adam", again.adam);
  const auto found = checkpoints.restore_latest();
  expect("no checkpoint, or another step's", found && found->step == 4);
  again.train(world, 4, kSteps);
  expect_equal("parameters of a resumed run", flat(again.net->parameters()),
               flat(run.net->parameters()));
  for (const auto& parameter : again.net->parameters())
    expect("a restored parameter is on another device", parameter.device() == world.device());
  world.group().barrier().wait();
}

// The device's generator goes on where it was.
void generators(const World& world) {
  const SharedFolder folder(world);
  Checkpointer checkpoints(world.group(), folder.path());
  at::Tensor own = at::zeros({4}, on(world, at::kFloat));
  checkpoints.track("own", own);
  checkpoints.track_generators();
  at::rand({1000}, on(world, at::kFloat));
  checkpoints.save(1);
  const at::Tensor expected = at::rand({1000}, on(world, at::kFloat)).cpu();
  checkpoints.restore_latest();
  expect_equal("numbers drawn after a restore", at::rand({1000}, on(world, at::kFloat)), expected);
  world.group().barrier().wait();
}

// Through pinned memory, made ahead by threads.
void loader(const World& world) {
  const at::Tensor x = at::arange(1000 * 16).to(at::kFloat).view({1000, 16}), y = at::arange(1000);
  const data::TensorDataset dataset(x, y);
  const data::LoaderOptions options{.batch_size = 32, .seed = 7};
  auto to_device = options;
  to_device.device = world.device();
  to_device.prefetch = 4;
  to_device.workers = 2;
  data::Loader here(dataset, world, options);
  data::Loader there(dataset, world, to_device);
  for (int64_t epoch = 0; epoch < 3; ++epoch) {
    std::vector<at::Tensor> expected, actual;
    for (const auto& [a, b] : here.epoch(epoch)) expected.push_back(at::cat({a.sum(1), b}));
    for (const auto& [a, b] : there.epoch(epoch)) {
      expect("a batch is on another device", a.device() == world.device());
      actual.push_back(at::cat({a.sum(1), b}));  // computed after the copy, on its stream
    }
    expect_equal("batches on the device", flat(actual), flat(expected));
  }
}

}  // namespace

std::vector<Check> state_checks() {
  return {{"checkpoint", [](const World& world) { checkpoint(world, false); }},
          {"async_checkpoint", [](const World& world) { checkpoint(world, true); }},
          {"generators", generators},
          {"loader", loader}};
}

}  // namespace lockstep::on_gpu
