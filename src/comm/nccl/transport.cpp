#include "comm/nccl/transport.h"

#include <ATen/ATen.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <thread>

#include "comm/device/capture.h"
#include "comm/nccl/memory.h"
#include "comm/nccl/ops.h"
#include "comm/nccl/state.h"
#include "comm/text.h"
#include "lockstep/core/error.h"

namespace lockstep::comm {
namespace {

// The two halves of a group, for the device and for the CPU: a failure of one ends the other.
struct Halves {
  std::shared_ptr<Transport> cpu;
  std::shared_ptr<NcclState> device;

  template <class Call>
  auto guarded(const Call& call) -> decltype(call()) {
    try {
      device->check_alive();
      return call();
    } catch (const CommError& error) {
      device->give_up(error.what());
      cpu->give_up(error.what());
      throw;
    }
  }
};

// Messages that are deferred until the program waits for one or makes another call.
struct Messages {
  std::vector<Request> requests;
  std::vector<std::shared_ptr<DeviceCall>> calls;
};

// The part of a transport that its operations may outlive.
class Engine {
 public:
  Engine(std::shared_ptr<Halves> the_halves, c10::Stream the_stream)
      : halves(std::move(the_halves)),
        stream_(the_stream),
        ops_(device().comm(), device().diagnosis().rank(), device().diagnosis().size()) {}

  std::shared_ptr<DeviceCall> start(Notice notice, Request request);
  void flush();
  NcclState& device() const { return *halves->device; }

  const std::shared_ptr<Halves> halves;

 private:
  // Runs `enqueue` on the side stream; what NCCL refuses ends the group.
  template <class Enqueue>
  void on_stream(const Notice& notice, const Enqueue& enqueue);

  const c10::Stream stream_;
  NcclOps ops_;
  Messages messages_;
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

std::shared_ptr<DeviceCall> Engine::start(Notice notice, Request request) {
  device().sweep();
  const bool is_message = request.what == Collective::Send || request.what == Collective::Recv;
  if (!is_message) flush();
  // It begins after what is on the caller's stream now.
  c10::Event ready(stream_.device_type());
  ready.record(c10::impl::VirtualGuardImpl(stream_.device_type()).getStream(stream_.device()));
  ready.block(stream_);
  auto call = device().begin(std::move(notice), std::move(request));
  if (is_message) {
    messages_.requests.push_back(*call->request);
    messages_.calls.push_back(call);
    return call;
  }
  on_stream(call->notice, [&] { ops_.run(*call->request, stream_); });
  device().enqueued(*call, stream_);
  return call;
}

// One by one, messages that two ranks send each other would wait for each other on their streams.
void Engine::flush() {
  const Messages messages = std::exchange(messages_, {});
  if (messages.calls.empty()) return;
  on_stream(messages.calls.front()->notice, [&] { ops_.run_messages(messages.requests, stream_); });
  for (const auto& call : messages.calls) device().enqueued(*call, stream_);
}

class DevicePending : public Pending {
 public:
  DevicePending(std::shared_ptr<Engine> engine, std::shared_ptr<DeviceCall> call)
      : engine_(std::move(engine)), call_(std::move(call)) {}

 private:
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

class NcclTransport : public Transport {
 public:
  NcclTransport(std::shared_ptr<Halves> halves, Topology layout)
      : halves_(std::move(halves)),
        layout_(std::move(layout)),
        numbers_(state().diagnosis().rank(), state().diagnosis().size()),
        engine_(std::make_shared<Engine>(halves_, side_stream(state().device()))) {}

  std::string_view name() const override { return "nccl"; }
  int rank() const override { return state().diagnosis().rank(); }
  int size() const override { return state().diagnosis().size(); }
  std::chrono::milliseconds timeout() const override { return state().timeout(); }
  // The order of NCCL's sums is its own; two addends have only one, up to exchange.
  bool deterministic() const override { return size() == 2; }
  at::Device device() const override { return state().device(); }

  Work start(Request request) override;
  at::Tensor empty(at::IntArrayRef sizes, at::TensorOptions options) override {
    return halves_->guarded([&] {
      if (options.device().is_cpu()) return halves_->cpu->empty(sizes, options);
      const c10::DeviceGuard guard(state().device());
      return registered_memory(halves_->device, sizes, options);
    });
  }
  at::Tensor shared(at::IntArrayRef sizes, at::TensorOptions options) override {
    if (!options.device().is_cpu()) return {};
    return halves_->guarded([&] { return halves_->cpu->shared(sizes, options); });
  }
  void give_up(std::string_view why) noexcept override {
    halves_->device->give_up(why);
    halves_->cpu->give_up(why);
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
  void compare_sizes(const Request& request, const Notice& notice);
  NcclState& state() const { return *halves_->device; }

  const std::shared_ptr<Halves> halves_;
  const Topology layout_;
  CallNumbers numbers_;
  uint64_t collectives_ = 0;  // on either half
  const std::shared_ptr<Engine> engine_;
};

Work NcclTransport::start(Request request) {
  if (request.what != Collective::Send && request.what != Collective::Recv) ++collectives_;
  const at::Tensor* tensor = !request.outputs.empty()  ? &request.outputs[0]
                             : !request.inputs.empty() ? &request.inputs[0]
                                                       : nullptr;
  if (tensor == nullptr || tensor->is_cpu()) {
    return halves_->guarded([&] {
      const bool is_barrier = request.what == Collective::Barrier;
      return Work(std::make_shared<HostPending>(engine_, halves_->cpu->start(std::move(request)),
                                                is_barrier));
    });
  }
  NcclOps::check(request);
  const c10::Stream current =
      c10::impl::VirtualGuardImpl(device().type()).getStream(tensor->device());
  if (is_capturing(current)) {
    throw ConfigError(fmt::format(
        "[nccl] {}: the current stream is capturing a CUDA graph, and what a group does beside it "
        "(deadlines, comparing calls) would not be replayed: call it outside of the captured part",
        request.name()));
  }
  return halves_->guarded([&] {
    Notice notice = numbers_.next(request);
    compare_sizes(request, notice);
    auto call = engine_->start(std::move(notice), std::move(request));
    return Work(std::make_shared<DevicePending>(engine_, std::move(call)));
  });
}

// Where each rank has sizes of its own, they are compared first: NCCL would wait, or write too
// much.
void NcclTransport::compare_sizes(const Request& request, const Notice& notice) {
  const bool own_sizes = request.what == Collective::Gather ||
                         request.what == Collective::Scatter ||
                         (request.what == Collective::AllToAll && request.outputs.size() > 1);
  if (!own_sizes) return;
  at::Tensor sends = at::zeros({size()}, at::kLong), expects = at::zeros({size()}, at::kLong),
             comes = at::zeros({size()}, at::kLong);
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
      ->start({.what = Collective::AllToAll,
               .inputs = {sends},
               .outputs = {comes},
               .timeout = request.timeout,
               .label = request.label,
               .context = request.context,
               .advice = request.advice,
               .step_of = Request::Whole{request.name(), -1}})
      .wait();
  for (int r = 0; r < size(); ++r) {
    const auto is = comes[r].item<int64_t>(), wanted = expects[r].item<int64_t>();
    if (is == wanted) continue;
    throw CommError(fmt::format("[nccl] {} does not fit: {} sends {} bytes where {} expects {}",
                                notice.text, state().diagnosis().name(r), is,
                                state().diagnosis().name(rank()), wanted));
  }
}

// What each rank brings to the start.
struct DeviceOffer {
  nccl::UniqueId id;
  int version;
  int pid;
  char problem[500];
};

DeviceOffer make_offer(bool is_first) {
  DeviceOffer offer{};
  offer.pid = getpid();
  try {
    const nccl::Api& api = nccl::load();
    offer.version = api.version;
    if (is_first && api.GetUniqueId(&offer.id) != nccl::Success) {
      throw ConfigError(
          fmt::format("[nccl] {} makes no unique id: {}", api.path, api.GetLastError(nullptr)));
    }
  } catch (const ConfigError& error) {
    std::strncpy(offer.problem, error.what(), sizeof offer.problem - 1);
  }
  return offer;
}

std::vector<DeviceOffer> exchange_offers(const std::shared_ptr<Transport>& cpu) {
  const DeviceOffer mine = make_offer(cpu->rank() == 0);
  const auto texts = Group(cpu).all_gather_bytes(
      {reinterpret_cast<const char*>(&mine), sizeof mine}, {.label = "nccl"});
  std::vector<DeviceOffer> offers(texts.size());
  for (size_t r = 0; r < texts.size(); ++r) {
    std::memcpy(&offers[r], texts[r].data(), std::min(texts[r].size(), sizeof(DeviceOffer)));
    if (offers[r].problem[0] != '\0')
      throw ConfigError(fmt::format("{} (rank {})", offers[r].problem, r));
  }
  for (size_t r = 1; r < texts.size(); ++r) {
    if (offers[r].version == offers[0].version) continue;
    throw ConfigError(fmt::format(
        "[nccl] rank 0 has NCCL {}, rank {} has {}: all ranks need the same",
        nccl::version_text(offers[0].version), r, nccl::version_text(offers[r].version)));
  }
  return offers;
}

std::shared_ptr<Transport> NcclTransport::subset(const std::vector<int>& members, int color) {
  return halves_->guarded([&] {
    const auto prefix = fmt::format("split/{}/{}", collectives_, color);
    return make_nccl_transport(state().store().prefix(prefix), halves_->cpu->subset(members, color),
                               {state().device(), layout_.of(members), timeout()});
  });
}

}  // namespace

std::shared_ptr<Transport> make_nccl_transport(const Store& store, std::shared_ptr<Transport> cpu,
                                               const NcclOptions& options) {
  const int rank = cpu->rank();
  const std::vector<DeviceOffer> offers = exchange_offers(cpu);
  NcclState::Setup setup{options.device, options.layout.members, rank, options.timeout, {}};
  for (int r = 0; r < options.layout.size(); ++r) {
    setup.pids.push_back(options.layout.hosts[r] == options.layout.hosts[rank] ? offers[r].pid : 0);
  }
  const c10::DeviceGuard guard(options.device);
  auto halves = std::make_shared<Halves>();
  halves->cpu = std::move(cpu);
  try {
    halves->device = std::make_shared<NcclState>(nccl::load(), offers[0].id, store, setup);
  } catch (const CommError& error) {
    halves->cpu->give_up(error.what());
    throw;
  }
  return std::make_shared<NcclTransport>(std::move(halves), options.layout);
}

}  // namespace lockstep::comm
