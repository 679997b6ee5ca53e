#include "comm/tcp/transport.h"

#include <ATen/ATen.h>
#include <fmt/format.h>

#include <algorithm>

#include "comm/health/call_numbers.h"
#include "comm/net/ops.h"
#include "comm/tcp/ops.h"
#include "comm/tcp/state.h"
#include "comm/text.h"
#include "core/hash/mix.h"

namespace lockstep::comm {
namespace {

uint32_t checksum_of(std::string_view text) {
  const auto hash = fnv1a<uint32_t>(text);
  return hash ^ hash >> 16;
}

class TcpPending : public Pending {
 public:
  TcpPending(std::shared_ptr<TcpState> state, WireOperation operation, std::shared_ptr<NetJob> job,
             std::function<void()> finish)
      : state_(std::move(state)),
        operation_(std::move(operation)),
        job_(std::move(job)),
        finish_(std::move(finish)) {}
  // Only a group that goes away has unfinished operations; it must not wait for them.
  ~TcpPending() override {
    if (!job_->is_over()) state_->abandon();
    give_up();
  }

 private:
  void finish() override { finish_until(std::chrono::steady_clock::time_point::max()); }
  bool finish_within(std::chrono::microseconds limit) override {
    return finish_until(std::chrono::steady_clock::now() + limit);
  }
  bool finish_until(std::chrono::steady_clock::time_point until) {
    try {
      if (!state_->await(*job_, operation_, until)) return false;
    } catch (...) {
      give_up();
      throw;
    }
    const at::NoGradGuard no_grad;
    finish_();
    finish_ = nullptr;
    return true;
  }
  bool advance() override { return job_->is_over() || state_->has_failed(operation_); }
  // A group that another thread ends has failed before all of its calls are over.
  void give_up() noexcept {
    if (!job_->is_over()) state_->group().give_up(*job_);
  }

  const std::shared_ptr<TcpState> state_;
  WireOperation operation_;
  const std::shared_ptr<NetJob> job_;
  std::function<void()> finish_;
};

class TcpTransport : public Transport {
 public:
  explicit TcpTransport(std::shared_ptr<TcpState> state)
      : state_(std::move(state)),
        numbers_(rank(), size()),
        ranks_(state_->options().nodes.empty() ? size() : state_->options().ranks),
        direct_(std::make_shared<const Direct>(state_->options().nodes.empty()
                                                   ? Direct::of_ranks(ranks_)
                                                   : Direct(state_->options().nodes, ranks_))) {}

  std::string_view name() const override { return "tcp"; }
  int rank() const override { return state_->rank(); }
  int size() const override { return state_->size(); }
  std::chrono::milliseconds timeout() const override { return state_->options().timeout; }
  bool deterministic() const override { return true; }

  Work start(Request&& request) override;
  at::Tensor empty(at::IntArrayRef sizes, at::TensorOptions options) override {
    return at::zeros(sizes, options);
  }
  void abort_all(std::string_view why) noexcept override { state_->abort_all(why); }
  std::optional<std::string> failure() override { return state_->failure(); }
  std::shared_ptr<void> making_subsets() override {
    return std::make_shared<Store::Making>(state_->store(), 1);
  }
  std::shared_ptr<Transport> subset(const std::vector<int>& members, int color) override;
  std::string obstacle() const override { return state_->net()->unacknowledged(); }

  // No rank continues, or exits and with it the store, before all have come.
  void meet();

 private:
  const std::shared_ptr<TcpState> state_;
  CallNumbers numbers_;
  const int ranks_;
  const std::shared_ptr<const Direct> direct_;
};

Work TcpTransport::start(Request&& request) {
  state_->check_alive();
  const at::NoGradGuard no_grad;
  // What throws comes before the call is numbered: else the next one would be another on this rank
  // than on the others.
  TcpCall call = tcp_call(request, rank(), size(), ranks_, direct_);
  WireOperation operation{.notice = numbers_.next(request), .timeout = request.timeout};
  NetCallName name{.number = static_cast<uint32_t>(operation.notice.number),
                   .checksum = checksum_of(operation.notice.signature),
                   .meets = has_own_sizes(request, size())};
  if (request.what == Collective::Send || request.what == Collective::Recv) {
    name.kind =
        request.what == Collective::Send ? NetCallName::Kind::Send : NetCallName::Kind::Recv;
    name.peer = request.peer;
    name.meets = true;
  }
  try {
    if (!call.begin) {
      state_->group().skip(name, operation.notice.text);
      return {};
    }
    auto job = state_->group().start(name, call.begin);
    return Work(
        std::make_shared<TcpPending>(state_, operation, std::move(job), std::move(call.finish)));
  } catch (const std::exception& error) {
    // The call counts here, and the others would wait for this rank's part of it.
    state_->fail(operation, fmt::format("failed ({})", first_line(error)));
  }
}

void TcpTransport::meet() {
  WireOperation operation{.notice = {.lane = "start", .signature = "start", .text = "start"},
                          .timeout = timeout()};
  const auto job = state_->group().start({.number = 0, .checksum = 1}, net::barrier);
  constexpr auto kAnswer = std::chrono::seconds(1);
  while (!state_->await(*job, operation, std::chrono::steady_clock::now() + kAnswer)) {
    const std::string unanswered = state_->net()->unanswered();
    operation.notice.advice = unanswered.empty() ? "" : unanswered + ": a firewall?";
  }
}

std::shared_ptr<Transport> make(std::shared_ptr<Net> net, const Store& store, int rank,
                                const TcpOptions& options) {
  auto transport = std::make_shared<TcpTransport>(
      std::make_shared<TcpState>(std::move(net), store, rank, options));
  transport->meet();
  return transport;
}

std::shared_ptr<Transport> TcpTransport::subset(const std::vector<int>& members, int color) {
  state_->check_alive();
  TcpOptions options{.timeout = timeout()};
  for (const int member : members) {
    options.members.push_back(state_->members()[static_cast<size_t>(member)]);
  }
  const auto own = std::find(members.begin(), members.end(), rank());
  // The number of collectives so far tells apart the splits of this group.
  const Store store =
      state_->store().prefix(fmt::format("split/{}/{}", numbers_.collectives(), color));
  return make(state_->net(), store, static_cast<int>(own - members.begin()), options);
}

}  // namespace

std::shared_ptr<Transport> make_tcp_transport(std::shared_ptr<Net> net, const Store& store,
                                              int rank, const TcpOptions& options) {
  return make(std::move(net), store, rank, options);
}

}  // namespace lockstep::comm
