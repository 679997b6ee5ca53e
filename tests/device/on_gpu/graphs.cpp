// CUDA graphs with a group's calls in them. On the CPU "launching" is to run what would have been
// captured.
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <dlfcn.h>

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <optional>
#include <thread>
#include <type_traits>
#include <vector>

#include "lockstep/core/error.h"
#include "lockstep/parallel/call.h"
#include "lockstep/parallel/clip.h"
#include "lockstep/parallel/ddp.h"
#include "lockstep/parallel/fsdp.h"
#include "lockstep/parallel/fused_adam.h"
#include "lockstep/parallel/sync_batch_norm.h"
#include "lockstep/parallel/zero_optimizer.h"
#include "on_gpu/checks.h"

namespace lockstep::on_gpu {
namespace {

// A stream that can capture, which the default one cannot, as the current one.
std::optional<c10::StreamGuard> on_side_stream(const World& world) {
  if (world.device().is_cpu()) return std::nullopt;
  const c10::impl::VirtualGuardImpl device(world.device().type());
  return std::optional<c10::StreamGuard>(std::in_place,
                                         device.getStreamFromGlobalPool(world.device()));
}

// Of graph/cuda_graph.cpp.
struct CudaGraphs {
  void* (*begin_capture)();
  void (*end_capture)(void*), (*launch)(void*), (*destroy)(void*);

  static const CudaGraphs& loaded() {
    static const CudaGraphs all = [] {
      void* library = dlopen("libon_gpu_graph.so", RTLD_NOW);
      if (library == nullptr) throw Error(std::string("no CUDA graphs: ") + dlerror());
      const auto find = [&](auto& function, const char* name) {
        function = reinterpret_cast<std::decay_t<decltype(function)>>(dlsym(library, name));
      };
      CudaGraphs found{};
      find(found.begin_capture, "on_gpu_begin_capture");
      find(found.end_capture, "on_gpu_end_capture");
      find(found.launch, "on_gpu_launch");
      find(found.destroy, "on_gpu_destroy");
      return found;
    }();
    return all;
  }
};

class Captured {
 public:
  Captured(const World& world, std::function<void()> body) : body_(std::move(body)) {
    if (world.device().is_cpu()) return;
    const CudaGraphs& graphs = CudaGraphs::loaded();
    graph_ = {graphs.begin_capture(), graphs.destroy};
    try {
      body_();
    } catch (...) {
      try {
        graphs.end_capture(graph_.get());
      } catch (const std::exception&) {
        // It is of no use any more; what is thrown says why.
      }
      throw;
    }
    graphs.end_capture(graph_.get());
  }
  void launch() { graph_ ? CudaGraphs::loaded().launch(graph_.get()) : body_(); }

 private:
  std::function<void()> body_;
  std::unique_ptr<void, void (*)(void*)> graph_{nullptr, [](void*) {}};
};

// Whether the group's calls can be captured. A refusal is right only where streams wait (no MPS) or
// calls go over NCCL.
bool has_graphs(const World& world, const Group& group) {
  if (world.device().is_cpu() || world.size() == 1) return world.device().is_cpu();
  const at::Tensor data = at::ones({4}, on(world, at::kFloat));
  group.all_reduce(data).wait();
  try {
    const Captured graph(world, [&] { group.all_reduce(data).wait(); });
    return true;
  } catch (const ConfigError& error) {
    expect(std::string("refused under MPS: ") + error.what(),
           std::getenv("CUDA_MPS_PIPE_DIRECTORY") == nullptr);
    expect("the refusal",
           std::string(error.what()).find("is capturing a CUDA graph") != std::string::npos);
    return false;
  }
}

void collectives(const World& world) {
  const auto side = on_side_stream(world);
  const Group group = world.group();
  if (!has_graphs(world, group)) return;
  const int n = world.size(), rank = world.rank();
  for (const auto& [count, shares] : std::vector<std::pair<int64_t, bool>>{
           {1000, false}, {100'000, false}, {5'000'000, false}, {3'000'000, true}}) {
    const at::Tensor data = shares ? group.empty({count}, on(world, at::kFloat))
                                   : at::zeros({count}, on(world, at::kFloat));
    const at::Tensor all = at::zeros({n * 1000}, on(world, at::kFloat)),
                     got = at::zeros({1000}, on(world, at::kFloat)),
                     other = at::ones({70'000}, on(world, at::kFloat));
    Captured graph(world, [&] {
      group.all_reduce(data).wait();
      group.all_gather(all, data.narrow(0, 0, 1000)).wait();
      if (n == 1) return;
      auto sent = group.send(all.narrow(0, 0, 1000), (rank + 1) % n);
      auto received = group.recv(got, (rank + n - 1) % n);
      sent.wait();
      received.wait();
    });
    for (int launch = 0; launch < 7; ++launch) {
      data.fill_(rank + 1 + 10 * launch);
      graph.launch();
      if (launch % 2 == 1) group.all_reduce(other.fill_(1)).wait();
      const double sum = n * (n + 1) / 2.0 + 10.0 * launch * n;
      expect_equal("a launch's sum", data, at::full({count}, sum, at::kFloat));
      expect_equal("a launch's parts", all, at::full({n * 1000}, sum, at::kFloat));
      if (n > 1) expect_equal("a launch's message", got, at::full({1000}, sum, at::kFloat));
      if (launch % 2 == 1) expect_equal("a call between", other, at::full({70'000}, n, at::kFloat));
    }
    // One after another without the host.
    std::vector<at::Tensor> results;
    for (int launch = 0; launch < 50; ++launch) {
      data.fill_(rank + 1 + 10 * (launch % 10));
      graph.launch();
      results.push_back(data.narrow(0, 0, 100).clone());
    }
    for (int launch = 0; launch < 50; ++launch) {
      const double sum = n * (n + 1) / 2.0 + 10.0 * (launch % 10) * n;
      expect_equal("launches in a row", results[launch], at::full({100}, sum, at::kFloat));
    }
  }
  group.barrier().wait();
}

// What a step has besides Ddp and an optimizer of libtorch's.
enum class With { Nothing, Zero, Clipping, SyncBatchNorm };

struct Trained {
  at::Tensor parameters;
  double step_us;
};

Trained trained(const World& world, With with, bool captures) {
  const auto side = on_side_stream(world);
  auto net = small_net(world);
  if (with == With::SyncBatchNorm) {
    net->push_back(torch::nn::BatchNorm1d(4));
    net->to(world.device(), at::kDouble);
    convert_sync_batch_norm(net, world.group());
  }
  Ddp ddp(net, world.group(), {.bucket_bytes = {2000}, .buffers = Buffers::None});
  const auto options = torch::optim::SGDOptions(0.1).momentum(0.9);
  std::unique_ptr<torch::optim::Optimizer> optimizer;
  if (with == With::Zero) {
    optimizer = std::make_unique<ZeroOptimizer>(net->parameters(), world.group(),
                                                zero<torch::optim::SGD>(options));
  } else {
    optimizer = std::make_unique<torch::optim::SGD>(net->parameters(), options);
  }
  const at::Tensor batch = batch_of(world, world.rank(), 0).clone();
  const auto step = [&] {
    ddp.zero_grad();
    net->forward(batch).square().mean().backward();
    if (with == With::Clipping) clip_grad_norm_(net->parameters(), 0.1);
    optimizer->step();
  };
  for (int i = 0; i < 3; ++i) step();
  std::optional<Captured> graph;
  if (captures) graph.emplace(world, step);
  for (int i = 1; i < kSteps; ++i) {
    batch.copy_(batch_of(world, world.rank(), i));
    captures ? graph->launch() : step();
  }
  Trained result{.parameters = flat(net->parameters()), .step_us = 0};
  constexpr int kTimed = 100;
  const auto begin = std::chrono::steady_clock::now();
  for (int i = 0; i < kTimed; ++i) captures ? graph->launch() : step();
  (void)flat(net->parameters());
  const std::chrono::duration<double, std::micro> took = std::chrono::steady_clock::now() - begin;
  result.step_us = took.count() / kTimed;
  return result;
}

void steps_of_ddp(const World& world) {
  {
    const auto side = on_side_stream(world);
    if (world.size() > 1 && !has_graphs(world, world.group())) return;
  }
  for (const auto with : {With::Nothing, With::Zero, With::Clipping, With::SyncBatchNorm}) {
    const Trained captured = trained(world, with, true), plain = trained(world, with, false);
    expect_close("parameters of captured steps, " + std::to_string(static_cast<int>(with)),
                 captured.parameters, plain.parameters, 1e-11);
    if (world.is_main())
      std::printf("a step in %.0f us, in a graph in %.0f us\n", plain.step_us, captured.step_us);
  }
}

std::string said_in_capture(const World& world, const std::function<void()>& body) {
  try {
    const Captured graph(world, body);
  } catch (const ConfigError& error) {
    return error.what();
  }
  return {};
}

// What would go wrong in silence.
void refused(const World& world) {
  if (world.device().is_cpu()) return;
  const auto side = on_side_stream(world);
  const auto is_refusal = [](const std::string& said) {
    return said.find("the current stream is capturing a CUDA graph, and") != std::string::npos;
  };
  auto net = small_net(world);
  FusedAdamW adam(net->parameters());
  const at::Tensor batch = batch_of(world, world.rank(), 0);
  for (int i = 0; i < 2; ++i) {
    net->forward(batch).square().mean().backward();
    adam.step();
  }
  const std::string of_adam = said_in_capture(world, [&] { adam.step(); });
  expect("FusedAdamW in a capture: " + of_adam, is_refusal(of_adam));
  if (world.size() > 1) {
    auto normal = small_net(world);
    normal->push_back(torch::nn::BatchNorm1d(4));
    normal->to(world.device(), at::kDouble);
    Ddp ddp(normal, world.group());
    const auto pass = [&] { normal->forward(batch).square().mean().backward(); };
    for (int i = 0; i < 3; ++i) pass();
    const std::string of_buffers = said_in_capture(world, pass);
    expect("Ddp with buffers in a capture: " + of_buffers, is_refusal(of_buffers));
    ddp.zero_grad();
  }
  auto sharded = small_net(world);
  Fsdp fsdp(sharded, world.group());
  torch::optim::SGD sgd(fsdp.parameters(), 0.1);
  const auto step = [&] {
    fsdp.zero_grad();
    call(sharded, batch).square().mean().backward();
    sgd.step();
  };
  step();
  const std::string of_fsdp = said_in_capture(world, step);
  expect("Fsdp in a capture: " + of_fsdp, is_refusal(of_fsdp));
  step();
}

// The watch of a call that is under way must not disturb a capture.
void beside_calls(const World& world, const Group& group) {
  const auto side = on_side_stream(world);
  const int64_t width = world.device().is_cpu() ? 64 : 4096;
  at::Tensor x = at::eye(width, on(world, at::kFloat));
  const at::Tensor data = at::ones({1000}, on(world, at::kFloat));
  const at::Tensor small = at::ones({10}, on(world, at::kFloat));
  for (int i = 0; i < 100; ++i) x = at::mm(x, x);
  data.add_(x[0][0] * 0);
  auto work = group.all_reduce(data);
  Captured graph(world, [&] {
    small.mul_(2);
    std::this_thread::sleep_for(std::chrono::milliseconds(60));  // the watch looks every 10 ms
  });
  graph.launch();
  work.wait();
  expect_equal("the captured part", small, at::full({10}, 2, at::kFloat));
  expect_equal("the call beside it", data, at::full({1000}, world.size(), at::kFloat));
}

// A launch that the other ranks do not make ends, and leaves the device free.
void deadline(const World& world) {
  const auto side = on_side_stream(world);
  if (world.device().is_cpu() || world.size() == 1 || !has_graphs(world, world.group())) return;
  const Group group = world.group().split(0, world.rank());
  const at::Tensor data = at::ones({100'000}, on(world, at::kFloat));
  Captured graph(world, [&] {
    group.all_reduce(data, comm::ReduceOp::Sum, {std::chrono::milliseconds(1500)}).wait();
  });
  std::string said;
  try {
    if (world.rank() == 0) {
      graph.launch();
      (void)data.cpu();
    }
    group.barrier().wait();
  } catch (const CommError& error) {
    said = error.what();
  }
  expect("the deadline of a launch: " + said,
         said.find("timed out after 1.5 s") != std::string::npos);
  const at::Tensor other = at::ones({10}, on(world, at::kFloat));
  world.group().all_reduce(other).wait();
  expect_equal("a call of another group", other, at::full({10}, world.size(), at::kFloat));
}

// Memory of a group's own may outlive it, and its last call may have used it.
void memory_and_groups(const World& world, const Group& whole) {
  for (const bool group_first : {true, false}) {
    Group group = whole.split(0, world.rank());
    at::Tensor memory = group.empty({4'000'000}, on(world, at::kFloat));
    memory.fill_(1);
    group.all_reduce(memory).wait();
    if (group_first) group = {};
    expect_equal("memory", memory, at::full({4'000'000}, world.size(), at::kFloat));
    memory.reset();
  }
}

}  // namespace

std::vector<Check> graph_checks(const Group& group) {
  return {{"graphs", collectives},
          {"graphs_of_ddp", steps_of_ddp},
          {"graphs_refused", refused},
          {"graphs_beside_calls", [group](const World& world) { beside_calls(world, group); }},
          {"graphs_deadline", deadline},
          {"memory_and_groups", [group](const World& world) { memory_and_groups(world, group); }}};
}

}  // namespace lockstep::on_gpu
