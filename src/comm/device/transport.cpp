#include "comm/device/transport.h"

#include <ATen/ATen.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <fmt/format.h>

#include <chrono>
#include <thread>

#include "comm/device/capture.h"
#include "comm/health/call_numbers.h"
#include "comm/text.h"
#include "lockstep/core/error.h"

namespace lockstep::comm {
namespace {

// The two halves of a group, for the device and for the CPU: a failure of one ends the other.
struct Halves {
  std::shared_ptr<Transport> cpu;
  std::shared_ptr<DeviceState> device;

  template <class Call>
  auto guarded(const Call& call) -> decltype(call()) {
    try {
      device->check_alive();
      return call();
    } catch (const CommError& error) {
      device->abort_all(error.what());
      cpu->abort_all(error.what());
      throw;
    }
  }
};

// The part of a transport that its operations may outlive.
class Engine {
 public:
  Engine(std::shared_ptr<Halves> the_halves, std::unique_ptr<DeviceOps> the_ops,
         c10::Stream the_stream)
      : halves(std::move(the_halves)),
        ops(std::move(the_ops)),
        stream_(the_stream),
        ready_(the_stream.device_type()) {}

  std::shared_ptr<DeviceCall> start(Notice notice, Request request, int64_t largest,
                                    bool is_captured);
  void flush();
  DeviceState& device() const { return *halves->device; }

  const std::shared_ptr<Halves> halves;
  const std::unique_ptr<DeviceOps> ops;

 private:
  // Runs `enqueue` on the side stream; what is refused there ends the group.
  template <class Enqueue>
  void on_stream(const Notice& notice, const Enqueue& enqueue);

  const c10::Stream stream_;
  c10::Event ready_;  // what is on the caller's stream before a call
  // Put off until somebody waits or something else is called.
  DeviceOps::Calls messages_;
};

template <class Enqueue>
void Engine::on_stream(const Notice& notice, const Enqueue& enqueue) {
  const c10::DeviceGuard device_guard(device().device());
  const c10::StreamGuard stream_guard(stream_);
  const at::NoGradGuard no_grad;
  try {
    enqueue();
  } catch (const std::exception& error) {
    // Also when memory is short: the other ranks are in the call, or will be.
    device().fail(notice, fmt::format("failed ({})", first_line(error)));
    device().check_alive();
  }
}

std::shared_ptr<DeviceCall> Engine::start(Notice notice, Request request, int64_t largest,
                                          bool is_captured) {
  device().sweep();
  const bool is_message = request.what == Collective::Send || request.what == Collective::Recv;
  // What was put off outside of a capture is not to become a part of the graph, nor the other way
  // round.
  const bool is_apart = !messages_.empty() && is_captured != (messages_.front()->captured > 0);
  if (!is_message || is_apart) flush();
  // It begins after what is on the caller's stream now.
  ready_.record(c10::impl::VirtualGuardImpl(stream_.device_type()).getStream(stream_.device()));
  ready_.block(stream_);
  auto call = is_captured ? device().begin_captured(std::move(notice), std::move(request))
                          : device().begin(std::move(notice), std::move(request));
  call->largest = largest;
  if (is_message) {
    messages_.push_back(call);
    return call;
  }
  on_stream(call->notice, [&] { ops->run(*call, stream_); });
  device().enqueued(*call, stream_);
  return call;
}

// One by one, messages that two ranks send each other would wait for each other on their streams.
void Engine::flush() {
  const DeviceOps::Calls messages = std::exchange(messages_, {});
  if (messages.empty()) return;
  on_stream(messages.front()->notice, [&] { ops->run_messages(messages, stream_); });
  for (const auto& call : messages) device().enqueued(*call, stream_);
}

class DevicePending : public Pending {
 public:
  DevicePending(std::shared_ptr<Engine> engine, std::shared_ptr<DeviceCall> call)
      : engine_(std::move(engine)), call_(std::move(call)) {}

 protected:
  void finish() override {
    engine_->halves->guarded([&] {
      if (!call_->recorded) engine_->flush();
      engine_->device().wait(*call_);
    });
  }
  bool advance() override {
    if (!call_->recorded) engine_->halves->guarded([&] { engine_->flush(); });
    return engine_->device().is_over(*call_);
  }

  const std::shared_ptr<Engine> engine_;
  const std::shared_ptr<DeviceCall> call_;
};

// A graph's. The order of what is captured is all that waiting is here.
class CapturedPending : public DevicePending {
 public:
  using DevicePending::DevicePending;

 private:
  void finish() override {
    if (!is_capturing(engine_->device().device())) {
      throw ConfigError(fmt::format(
          "[{}] {} was captured in a CUDA graph, and the current stream captures none: wait() "
          "belongs to the captured part",
          engine_->device().name(), call_->notice.text));
    }
    DevicePending::finish();
  }
  // Never as far as the host can tell.
  bool finish_within(std::chrono::microseconds) override { return false; }
  bool advance() override { return false; }
};

// Of the CPU's half.
class HostPending : public Pending {
 public:
  HostPending(std::shared_ptr<Engine> engine, Work work, bool drains)
      : engine_(std::move(engine)), work_(std::move(work)), drains_(drains) {}

 private:
  bool finish_within(std::chrono::microseconds limit) override {
    const auto until = std::chrono::steady_clock::now() + limit;
    const bool over = engine_->halves->guarded([&] {
      engine_->flush();
      return work_.wait_for(limit);
    });
    if (!over) return false;
    while (drains_ && !engine_->device().is_idle()) {
      if (std::chrono::steady_clock::now() >= until) return false;
      std::this_thread::sleep_for(std::chrono::microseconds(50));
    }
    finish();
    return true;
  }
  void finish() override {
    engine_->halves->guarded([&] {
      // Other ranks may need this one's messages before they come to what is waited for.
      engine_->flush();
      work_.wait();
      if (!drains_) return;
      engine_->device().drain();
    });
  }
  bool advance() override {
    if (drains_) engine_->halves->guarded([&] { engine_->flush(); });
    return work_.is_completed() && (!drains_ || engine_->device().is_idle());
  }

  const std::shared_ptr<Engine> engine_;
  Work work_;
  const bool drains_;
};

class DeviceTransport : public Transport {
 public:
  DeviceTransport(std::shared_ptr<Halves> halves, std::unique_ptr<DeviceOps> ops,
                  DeviceOptions options, MakeDeviceTransport again)
      : halves_(std::move(halves)),
        options_(std::move(options)),
        again_(again),
        numbers_(state().diagnosis().rank(), state().diagnosis().size()),
        engine_(std::make_shared<Engine>(halves_, std::move(ops), side_stream(state().device()))) {}

  std::string_view name() const override { return state().name(); }
  int rank() const override { return state().diagnosis().rank(); }
  int size() const override { return state().diagnosis().size(); }
  std::chrono::milliseconds timeout() const override { return state().timeout(); }
  bool deterministic() const override { return engine_->ops->deterministic(); }
  at::Device device() const override { return state().device(); }

  Work start(Request&& request) override;
  at::Tensor empty(at::IntArrayRef sizes, at::TensorOptions options) override {
    return halves_->guarded([&] {
      const bool is_cpu = options.device().is_cpu();
      const c10::DeviceGuard guard(state().device());
      if (!is_cpu) {
        refuse_capture(device(), fmt::format("[{}] empty", name()),
                       "all ranks make such memory together: make it before");
      }
      // Other ranks may need this one's messages before they come to it.
      engine_->flush();
      return is_cpu ? halves_->cpu->empty(sizes, options) : engine_->ops->empty(sizes, options);
    });
  }
  at::Tensor shared(at::IntArrayRef sizes, at::TensorOptions options) override {
    if (!options.device().is_cpu()) return {};
    return halves_->guarded([&] {
      engine_->flush();  // as in empty()
      return halves_->cpu->shared(sizes, options);
    });
  }
  void abort_all(std::string_view why) noexcept override {
    halves_->device->abort_all(why);
    halves_->cpu->abort_all(why);
  }
  std::optional<std::string> failure() override {
    if (const auto why = halves_->device->failure()) return why;
    return halves_->cpu->failure();
  }
  std::shared_ptr<void> making_subsets() override {
    return std::make_shared<Store::Making>(state().store(), 1);
  }
  std::shared_ptr<Transport> subset(const std::vector<int>& members, int color) override;

 private:
  static c10::Stream side_stream(at::Device device) {
    return c10::impl::VirtualGuardImpl(device.type())
        .getStreamFromGlobalPool(device, /*isHighPriority=*/true);
  }
  int64_t compare_sizes(const Request& request, const Notice& notice);
  DeviceState& state() const { return *halves_->device; }

  const std::shared_ptr<Halves> halves_;
  const DeviceOptions options_;
  const MakeDeviceTransport again_;
  CallNumbers numbers_;
  uint64_t collectives_ = 0;  // on either half
  const std::shared_ptr<Engine> engine_;
};

Work DeviceTransport::start(Request&& request) {
  if (request.what != Collective::Send && request.what != Collective::Recv) ++collectives_;
  const at::Tensor* tensor = !request.outputs.empty()  ? &request.outputs[0]
                             : !request.inputs.empty() ? &request.inputs[0]
                                                       : nullptr;
  if (tensor == nullptr || tensor->is_cpu()) {
    const bool is_barrier = request.what == Collective::Barrier;
    if (is_barrier)
      refuse_capture(device(), fmt::format("[{}] barrier", name()),
                     "the host waits in it: call it outside of the captured part");
    return halves_->guarded([&] {
      return Work(std::make_shared<HostPending>(engine_, halves_->cpu->start(std::move(request)),
                                                is_barrier));
    });
  }
  engine_->ops->check(request);
  const bool is_captured = is_capturing(device());
  if (const auto why = engine_->ops->refuses_graphs())
    refuse_capture(device(), fmt::format("[{}] {}", name(), request.name()), *why);
  return halves_->guarded([&] {
    Notice notice = numbers_.next(request);
    const int64_t largest = compare_sizes(request, notice);
    auto call = engine_->start(std::move(notice), std::move(request), largest, is_captured);
    if (is_captured) return Work(std::make_shared<CapturedPending>(engine_, std::move(call)));
    return Work(std::make_shared<DevicePending>(engine_, std::move(call)));
  });
}

// Where each rank has sizes of its own, they are compared first: a device would wait, or write too
// much. The most bytes that a rank sends another then, or 0.
int64_t DeviceTransport::compare_sizes(const Request& request, const Notice& notice) {
  const bool own_sizes = request.what == Collective::Gather ||
                         request.what == Collective::Scatter ||
                         (request.what == Collective::AllToAll && request.outputs.size() > 1);
  if (!own_sizes) return 0;
  // Other ranks may need this one's messages before they come here.
  engine_->flush();
  at::Tensor sends = at::zeros({size()}, at::kLong), expects = at::zeros({size()}, at::kLong),
             all = at::zeros({size(), size()}, at::kLong);
  const auto bytes = [](const at::Tensor& tensor) { return static_cast<int64_t>(tensor.nbytes()); };
  const auto fill = [&](const at::Tensor& counts, const std::vector<at::Tensor>& tensors,
                        bool to_one) {
    if (to_one) {
      counts[request.peer] = bytes(tensors[0]);
    } else {
      for (size_t r = 0; r < tensors.size(); ++r)
        counts[static_cast<int64_t>(r)] = bytes(tensors[r]);
    }
  };
  fill(sends, request.inputs, request.what == Collective::Gather);
  fill(expects, request.outputs, request.what == Collective::Scatter);
  halves_->cpu
      ->start({.what = Collective::AllGather,
               .inputs = {sends},
               .outputs = {all},
               .timeout = request.timeout,
               .label = request.label,
               .context = request.context,
               .advice = request.advice,
               .step_of = Request::Whole{std::string(request.name()), -1}})
      .wait();
  for (int r = 0; r < size(); ++r) {
    const auto is = all[r][rank()].item<int64_t>(), wanted = expects[r].item<int64_t>();
    if (is == wanted) continue;
    throw CommError(fmt::format("[{}] {} does not fit: {} sends {} bytes where {} expects {}",
                                name(), notice.text, state().diagnosis().name(r), is,
                                state().diagnosis().name(rank()), wanted));
  }
  return all.max().item<int64_t>();
}

std::shared_ptr<Transport> DeviceTransport::subset(const std::vector<int>& members, int color) {
  return halves_->guarded([&] {
    const auto prefix = fmt::format("split/{}/{}", collectives_, color);
    DeviceOptions options = options_;
    options.layout = options_.layout.of(members);
    return again_(state().store().prefix(prefix), halves_->cpu->subset(members, color), options);
  });
}

}  // namespace

std::shared_ptr<Transport> make_device_transport(const Store& store, DeviceParts parts,
                                                 const DeviceOptions& options) {
  const DeviceState::Setup setup{options.device, options.layout.members, parts.cpu->rank(),
                                 options.timeout, std::move(parts.pids)};
  const c10::DeviceGuard guard(options.device);
  auto halves = std::make_shared<Halves>();
  halves->cpu = std::move(parts.cpu);
  try {
    halves->device = std::make_shared<DeviceState>(std::move(parts.comm), store, setup);
  } catch (const CommError& error) {
    halves->cpu->abort_all(error.what());
    throw;
  }
  return std::make_shared<DeviceTransport>(std::move(halves), std::move(parts.ops), options,
                                           parts.again);
}

}  // namespace lockstep::comm
