#include "comm/gloo/transport.h"

#include <ATen/ATen.h>
#include <fmt/format.h>

#include <algorithm>
#include <numeric>
#include <optional>
#include <thread>

#include "comm/gloo/state.h"
#include "comm/health/call_numbers.h"
#include "comm/text.h"
#include "core/hash/mix.h"
#include "lockstep/core/error.h"

namespace lockstep::comm {
namespace {

// How much longer than us Gloo waits, so that it is our deadline that ends a wait and says why.
constexpr std::chrono::seconds kGrace{10};
// How long to wait until Gloo's threads no longer use the memory of a call whose connections are
// closed.
constexpr std::chrono::seconds kLettingGo{5};

uint32_t checksum_of(std::string_view text) {
  const auto hash = fnv1a<uint32_t>(text);
  return hash ^ hash >> 20;
}

class GlooPending : public Pending {
 public:
  GlooPending(std::shared_ptr<GlooState> state, WireOperation operation, GlooCall call)
      : state_(std::move(state)),
        operation_(std::move(operation)),
        call_(std::move(call)),
        place_(state_->add({operation_.notice, call_.works})) {}
  // Only a group that goes away has unfinished operations; it must not wait for them.
  ~GlooPending() override {
    if (!all_over()) state_->abandon();
    give_up();
    forget();
  }

 private:
  void finish() override { finish_until(std::chrono::steady_clock::time_point::max()); }
  bool finish_within(std::chrono::microseconds limit) override {
    return finish_until(std::chrono::steady_clock::now() + limit);
  }
  bool finish_until(std::chrono::steady_clock::time_point until) {
    try {
      for (const WireWork& work : call_.works) {
        if (!state_->await(work, operation_, until)) return false;
      }
    } catch (...) {
      give_up();
      throw;
    }
    state_->done(operation_);
    const at::NoGradGuard no_grad;
    call_.finish();
    call_ = {};
    forget();
    return true;
  }
  void forget() {
    if (place_) state_->remove(*place_);
    place_.reset();
  }

  bool advance() override { return all_over() || state_->has_failed(operation_); }
  // So that Gloo no longer touches the call's memory: a group that another thread ends has failed
  // before its connections are closed.
  void give_up() noexcept {
    if (all_over()) return;
    state_->close();
    const auto until = std::chrono::steady_clock::now() + kLettingGo;
    while (!all_over() && std::chrono::steady_clock::now() < until)
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }

  bool all_over() const {
    return std::all_of(call_.works.begin(), call_.works.end(),
                       [](const WireWork& work) { return work->isCompleted(); });
  }

  const std::shared_ptr<GlooState> state_;
  WireOperation operation_;
  GlooCall call_;
  std::optional<GlooState::Place> place_;
};

class GlooTransport : public Transport {
 public:
  explicit GlooTransport(std::shared_ptr<GlooState> state)
      : state_(std::move(state)), numbers_(rank(), size()) {}

  std::string_view name() const override { return "gloo"; }
  int rank() const override { return state_->rank(); }
  int size() const override { return state_->size(); }
  std::chrono::milliseconds timeout() const override { return state_->options().timeout; }
  bool deterministic() const override { return !has_python_ranks(); }
  bool has_python_ranks() const override { return state_->options().peers == GlooPeers::Python; }

  Work start(Request&& request) override;
  at::Tensor empty(at::IntArrayRef sizes, at::TensorOptions options) override {
    return at::zeros(sizes, options);
  }
  void set_idle_work(std::function<void()> work) override { idle_work_ = std::move(work); }
  void abort_all(std::string_view why) noexcept override { state_->abort_all(why); }
  std::optional<std::string> failure() override { return state_->failure(); }
  std::shared_ptr<void> making_subsets() override {
    return std::make_shared<Store::Making>(state_->store(), 1);
  }
  std::shared_ptr<Transport> subset(const std::vector<int>& members, int color) override;

 private:
  void await(const WireWork& work, WireOperation& operation);

  const std::shared_ptr<GlooState> state_;
  CallNumbers numbers_;
  std::function<void()> idle_work_ = [] {};
};

void GlooTransport::await(const WireWork& work, WireOperation& operation) {
  constexpr std::chrono::milliseconds kTurn{2};
  while (!state_->await(work, operation, std::chrono::steady_clock::now() + kTurn)) idle_work_();
}

Work GlooTransport::start(Request&& request) {
  state_->check_alive();
  const at::NoGradGuard no_grad;
  WireOperation operation{.notice = numbers_.next(request), .timeout = request.timeout};
  GlooCall call;
  try {
    call = state_->ops().launch(request, checksum_of(operation.notice.signature),
                                request.timeout + kGrace,
                                [&](const WireWork& work) { await(work, operation); });
  } catch (const CommError& error) {
    if (state_->is_dead()) throw;
    state_->fail(operation, error.what());
  } catch (const std::exception& error) {
    state_->fail(operation, fmt::format("failed ({})", first_line(error)));
  }
  if (call.works.empty()) return {};
  return Work(std::make_shared<GlooPending>(state_, std::move(operation), std::move(call)));
}

std::shared_ptr<Transport> GlooTransport::subset(const std::vector<int>& members, int color) {
  state_->check_alive();
  std::vector<int> of_world;
  for (const int member : members) of_world.push_back(state_->members()[member]);
  const auto own = std::find(members.begin(), members.end(), rank());
  // The number of collectives so far tells apart the splits of this group.
  const Store store =
      state_->store().prefix(fmt::format("split/{}/{}", numbers_.collectives(), color));
  return std::make_shared<GlooTransport>(std::make_shared<GlooState>(
      store, static_cast<int>(own - members.begin()), std::move(of_world), state_->options()));
}

}  // namespace

Store python_group_keys(const Store& store) {
  return store.prefix("default_pg").prefix("0/").prefix("cpu/");
}

std::shared_ptr<Transport> make_gloo_transport(const Store& store, int rank, int size,
                                               const GlooOptions& options) {
  std::vector<int> members = options.members;
  if (members.empty()) {
    members.resize(size);
    std::iota(members.begin(), members.end(), 0);
  }
  return std::make_shared<GlooTransport>(
      std::make_shared<GlooState>(store, rank, std::move(members), options));
}

}  // namespace lockstep::comm
