#include "comm/hierarchical/transport.h"

#include <ATen/ATen.h>
#include <fmt/format.h>

#include <algorithm>
#include <utility>

#include "comm/health/call_numbers.h"
#include "comm/hierarchical/two_levels.h"
#include "comm/reduce/slice.h"
#include "comm/reduce/tree.h"
#include "comm/shm/transport.h"
#include "comm/text.h"

namespace lockstep::comm {
namespace {

using std::chrono::milliseconds;

// A chunk of a large all_reduce: while it is between the hosts, the next is summed up within.
// docs/log.md has the measurement. A chunk is divided among columns and hosts: it grows with them,
// since slices of a few hundred bytes cost as many messages and carry nothing.
constexpr int64_t kLeastPiece = 1 << 20;
constexpr int64_t kLeastSlice = 16 << 10;

// How much later the deadlines of a call's parts are, which know of some ranks only: by then the
// group has said what every rank was doing.
constexpr milliseconds kLater = 2 * TwoLevels::kHearsay;

std::vector<std::vector<Range>> nodes_of(const std::vector<std::vector<int>>& hosts, int size) {
  std::vector<std::vector<Range>> nodes;
  for (const auto& ranks : hosts) nodes.push_back(maximal_nodes(ranks, size));
  return nodes;
}

// By which messages name the ranks of a host.
std::vector<int> numbers_of(const std::vector<int>& members, const LauncherStatus& status) {
  std::vector<int> numbers;
  for (const int member : members) numbers.push_back(status.number_of(member));
  return numbers;
}

}  // namespace

int64_t chunk_bytes(int columns, int hosts) {
  return std::max(kLeastPiece, int64_t{columns} * hosts * kLeastSlice);
}

namespace {

class HostThenNet : public Transport {
 public:
  HostThenNet(const Store& store, int rank, Topology layout, milliseconds timeout, MakeNet make_net,
              const WatchedProcesses& watched);

  std::string_view name() const override { return "host-then-net"; }
  int rank() const override { return rank_; }
  int size() const override { return layout_.size(); }
  milliseconds timeout() const override { return timeout_; }
  bool deterministic() const override { return true; }
  Work start(Request&& request) override;
  at::Tensor empty(at::IntArrayRef sizes, at::TensorOptions options) override {
    return levels_->guarded([&] { return levels_->host_reduce->empty(sizes, options); });
  }
  void move_on() override {
    levels_->guarded([&] { levels_->move_on(); });
  }
  void abort_all(std::string_view why) noexcept override { levels_->abort_all(why); }
  std::optional<std::string> failure() override {
    if (const auto why = levels_->end.why()) return why;
    for (const auto& part : {levels_->host_reduce, levels_->all}) {
      if (const auto why = part->failure()) return why;
    }
    return std::nullopt;
  }
  std::shared_ptr<void> making_subsets() override {
    return std::make_shared<Store::Making>(store_, 1);
  }
  std::shared_ptr<Transport> subset(const std::vector<int>& members, int color) override;

 private:
  // Its chunks, of which none is started.
  using Chunks = std::vector<Stages>;

  Chunks two_levels(const Request& request);
  Chunks all_reduce(const Request& request, const at::Tensor& tensor);
  Stages reduce_chunk(const Request& request, const at::Tensor& data);
  Chunks reduce_scatter(const Request& request);
  Chunks all_gather(const Request& request);
  Chunks broadcast(const Request& request);
  Chunks barrier(const Request& request);
  Work message(Request request);

  // A step of `request` by `transport`.
  std::function<Work()> step(const std::shared_ptr<Transport>& transport, const Request& request,
                             Request part) const;
  // Each rank of this host sums up its part over the host: one sum for each of its nodes.
  std::function<Work()> sum_within(const Request& request, const std::vector<at::Tensor>& parts,
                                   const std::vector<at::Tensor>& sums) const;
  std::vector<at::Tensor> of_ranks(const std::vector<at::Tensor>& tensors) const;
  std::vector<at::Tensor> of_host(const std::vector<at::Tensor>& of_ranks, int host) const;
  bool on_two_levels(const Request& request) const;
  int local_size() const { return static_cast<int>(hosts_[host_].size()); }
  int local_of(int rank) const;
  int host_of(int rank) const;

  const Store store_;
  const int rank_;
  const Topology layout_;
  const milliseconds timeout_;
  const MakeNet make_net_;
  const std::vector<std::vector<int>> hosts_;
  const int host_;           // of this rank
  const int local_;          // this rank on its host
  const int columns_;        // ranks of each host that talk to other hosts' in sums
  const bool even_;          // every host has as many ranks
  std::vector<Range> runs_;  // this host's nodes of the tree, in its own ranks
  size_t own_run_ = 0;       // the one that this rank is in
  const std::shared_ptr<TwoLevels> levels_;
  CallNumbers numbers_;
};

// What all steps of a call show in their place. Sums for different roots differ by nothing else.
Request::Whole whole_of(const Request& request) {
  Request::Whole whole{.name = std::string(request.name()), .list = list_of(request)};
  for (const at::Tensor& tensor :
       request.what == Collective::ReduceScatter ? request.inputs : request.outputs) {
    whole.count += tensor.numel();
  }
  if (request.what == Collective::Reduce || request.what == Collective::Broadcast)
    whole.root = request.peer;
  return whole;
}

int index_of(const std::vector<int>& list, int value) {
  return static_cast<int>(std::find(list.begin(), list.end(), value) - list.begin());
}

int host_with(const std::vector<std::vector<int>>& hosts, int rank) {
  int host = 0;
  while (index_of(hosts[host], rank) == static_cast<int>(hosts[host].size())) ++host;
  return host;
}

int fewest(const std::vector<std::vector<int>>& hosts) {
  size_t least = hosts.front().size();
  for (const auto& ranks : hosts) least = std::min(least, ranks.size());
  return static_cast<int>(least);
}

HostThenNet::HostThenNet(const Store& store, int rank, Topology layout, milliseconds timeout,
                         MakeNet make_net, const WatchedProcesses& watched)
    : store_(store),
      rank_(rank),
      layout_(std::move(layout)),
      timeout_(timeout),
      make_net_(std::move(make_net)),
      hosts_(layout_.by_host()),
      host_(host_with(hosts_, rank)),
      local_(index_of(hosts_[host_], rank)),
      columns_(fewest(hosts_)),
      even_(columns_ * static_cast<int>(hosts_.size()) == layout_.size()),
      levels_(std::make_shared<TwoLevels>(store.prefix("whole"), rank, layout_.members)),
      numbers_(rank, layout_.size()) {
  const auto nodes = nodes_of(hosts_, size());
  for (const Range& node : nodes[host_]) {
    const int first = index_of(hosts_[host_], static_cast<int>(node.begin));
    if (first <= local_ && local_ < first + node.size()) own_run_ = runs_.size();
    runs_.push_back({first, first + node.size()});
  }
  levels_->all = make_net_(store.prefix("all"), {.rank = rank, .members = layout_.members});
  if (local_size() == 1) {
    levels_->host_reduce = levels_->host_broadcast = make_solo_transport();
  } else {
    ShmOptions options{.timeout = timeout, .index = std::make_shared<GroupMemoryIndex>()};
    for (const int member : hosts_[host_]) {
      options.members.push_back(layout_.members[member]);
      options.doors.push_back(layout_.doors[member]);
      if (!watched.empty()) options.processes.push_back(watched[member]);
    }
    options.called = numbers_of(options.members, *store.launcher_status());
    const Store own = store.prefix(fmt::format("host/{}", host_));
    levels_->host_reduce = make_shm_transport(own.prefix("up"), local_, local_size(), options);
    levels_->host_broadcast = make_shm_transport(own.prefix("down"), local_, local_size(), options);
  }
  // Ranks of this host may wait for an earlier operation before they come to the call that blocks.
  levels_->all->set_idle_work([levels = levels_.get()] { levels->move_on(); });
  if (local_ >= columns_) return;
  NetMembers column{.rank = host_, .nodes = nodes, .ranks = size()};
  for (const auto& ranks : hosts_) column.members.push_back(layout_.members[ranks[local_]]);
  levels_->column = make_net_(store.prefix(fmt::format("column/{}", local_)), column);
}

int HostThenNet::host_of(int rank) const { return host_with(hosts_, rank); }
int HostThenNet::local_of(int rank) const { return index_of(hosts_[host_of(rank)], rank); }

// Calls that gain nothing from two levels go over the network alone.
bool HostThenNet::on_two_levels(const Request& request) const {
  switch (request.what) {
    case Collective::AllReduce:
    case Collective::Reduce:
    case Collective::Barrier:
      return true;
    case Collective::ReduceScatter:
    case Collective::AllGather:
      return even_;
    case Collective::Broadcast:
      return local_of(request.peer) < columns_;
    default:
      return false;
  }
}

Work HostThenNet::start(Request&& request) {
  return levels_->guarded([&]() -> Work {
    const at::NoGradGuard no_grad;
    // What throws comes before the call is numbered. Recorded is the group's number, not a step's.
    if (on_two_levels(request)) {
      request.step_of = whole_of(request);
      Chunks chunks = two_levels(request);
      const WireOperation operation{.notice = numbers_.next(request), .timeout = request.timeout};
      // Starting takes what is under way further. Peers that have dropped their operation and left
      // the group are an error for a rank that waits, and none for one that drops its own.
      try {
        TwoLevelWork::Chunks begun;
        for (Stages& chunk : chunks) begun.push_back(levels_->pipeline.add(std::move(chunk)));
        return Work(std::make_shared<TwoLevelWork>(levels_, operation, std::move(begun)));
      } catch (const std::exception&) {
        levels_->abort_all(thrown_text());
        return Work(std::make_shared<FailedWork>(std::current_exception()));
      }
    }
    const bool to_one = request.what == Collective::Send || request.what == Collective::Recv;
    Request part = request;
    part.call = 0;
    // Of a message its own two ranks know the most.
    (to_one ? request.timeout : part.timeout) += kLater;
    Work work = to_one ? message(std::move(part)) : levels_->all->start(std::move(part));
    return Work(std::make_shared<OneLevelWork>(
        levels_, WireOperation{.notice = numbers_.next(request), .timeout = request.timeout},
        std::move(work)));
  });
}

Work HostThenNet::message(Request request) {
  if (host_of(request.peer) != host_) return levels_->all->start(std::move(request));
  request.peer = local_of(request.peer);
  return levels_->host_reduce->start(std::move(request));
}

HostThenNet::Chunks HostThenNet::two_levels(const Request& request) {
  switch (request.what) {
    case Collective::AllReduce:
      return all_reduce(request, request.outputs[0]);
    case Collective::Reduce: {
      // A sum on all ranks costs as little between hosts; the other ranks' tensors keep their
      // values.
      const at::Tensor& own = request.outputs[0];
      return all_reduce(request, rank_ == request.peer ? own : own.clone());
    }
    case Collective::ReduceScatter:
      return reduce_scatter(request);
    case Collective::AllGather:
      return all_gather(request);
    case Collective::Broadcast:
      return broadcast(request);
    default:
      return barrier(request);
  }
}

std::function<Work()> HostThenNet::step(const std::shared_ptr<Transport>& transport,
                                        const Request& request, Request part) const {
  part.timeout = request.timeout + kLater;
  part.label = request.label;
  part.context = request.context;
  part.advice = request.advice;
  part.divide_by = request.divide_by;
  part.step_of = request.step_of;
  if (transport != levels_->column && part.step_of->root >= 0) {
    part.step_of->root = store_.launcher_status()->number_of(layout_.members[request.peer]);
  }
  return [transport, part = std::move(part)] { return transport->start(Request(part)); };
}

// An average is divided once, between the hosts.
std::function<Work()> HostThenNet::sum_within(const Request& request,
                                              const std::vector<at::Tensor>& parts,
                                              const std::vector<at::Tensor>& sums) const {
  return step(levels_->host_reduce, request,
              {.what = Collective::ReduceScatter,
               .inputs = parts,
               .outputs = sums,
               .op = request.op == ReduceOp::Average ? ReduceOp::Sum : request.op,
               .runs = runs_});
}

HostThenNet::Chunks HostThenNet::all_reduce(const Request& request, const at::Tensor& tensor) {
  const at::Tensor flat = tensor.detach().view({-1});
  const int64_t most = chunk_bytes(columns_, static_cast<int>(hosts_.size())) / flat.element_size();
  Chunks chunks;
  for (int64_t at = 0; chunks.empty() || at < flat.numel(); at += most) {
    chunks.push_back(reduce_chunk(request, flat.narrow(0, at, std::min(most, flat.numel() - at))));
  }
  return chunks;
}

// The data is cut among the columns. Each sums its region over the host, then over the hosts, and
// the ranks of the host put the regions together.
Stages HostThenNet::reduce_chunk(const Request& request, const at::Tensor& data) {
  std::vector<at::Tensor> regions;
  for (int local = 0; local < local_size(); ++local) {
    const Range region =
        local < columns_ ? slice_of(local, columns_, data.numel(), data.element_size()) : Range{};
    regions.push_back(data.narrow(0, region.begin, region.size()));
  }
  const at::Tensor& mine = regions[local_];
  std::vector<at::Tensor> sums;
  for (size_t run = 0; run < runs_.size(); ++run) {
    sums.push_back(run == own_run_ ? mine : at::empty_like(mine));
  }
  Stages steps;
  steps.within = sum_within(request, regions, sums);
  if (levels_->column && (mine.numel() > 0 || data.numel() == 0)) {
    steps.across =
        step(levels_->column, request,
             {.what = Collective::AllReduce, .inputs = sums, .outputs = {mine}, .op = request.op});
  }
  steps.back = step(levels_->host_broadcast, request,
                    {.what = Collective::AllGather, .inputs = {mine}, .outputs = regions});
  return steps;
}

// One tensor of size() equal parts, or the list as it is.
std::vector<at::Tensor> HostThenNet::of_ranks(const std::vector<at::Tensor>& tensors) const {
  if (tensors.size() != 1) return tensors;
  if (tensors[0].numel() == 0) return std::vector<at::Tensor>(size(), tensors[0]);
  return tensors[0].detach().view({size(), -1}).unbind(0);
}

std::vector<at::Tensor> HostThenNet::of_host(const std::vector<at::Tensor>& of_ranks,
                                             int host) const {
  std::vector<at::Tensor> tensors;
  for (const int member : hosts_[host]) tensors.push_back(of_ranks[member]);
  return tensors;
}

// The host sums up each other host's slices for itself; then the columns exchange the sums.
HostThenNet::Chunks HostThenNet::reduce_scatter(const Request& request) {
  const std::vector<at::Tensor> inputs = of_ranks(request.inputs);
  const auto host_count = static_cast<int>(hosts_.size());
  std::vector<at::Tensor> sums(runs_.size() * host_count);
  Chunks chunks;
  for (int host = 0; host < host_count; ++host) {
    const std::vector<at::Tensor> slices = of_host(inputs, host);
    std::vector<at::Tensor> own;
    for (size_t run = 0; run < runs_.size(); ++run) {
      own.push_back(sums[run * host_count + host] = at::empty_like(slices[local_]));
    }
    Stages steps;
    steps.within = sum_within(request, slices, own);
    if (host + 1 == host_count) {
      steps.across = step(levels_->column, request,
                          {.what = Collective::ReduceScatter,
                           .inputs = sums,
                           .outputs = request.outputs,
                           .op = request.op});
    }
    chunks.push_back(std::move(steps));
  }
  return chunks;
}

HostThenNet::Chunks HostThenNet::all_gather(const Request& request) {
  const std::vector<at::Tensor> outputs = of_ranks(request.outputs);
  std::vector<at::Tensor> column;
  for (const auto& ranks : hosts_) column.push_back(outputs[ranks[local_]]);
  Chunks chunks;
  for (size_t host = 0; host < hosts_.size(); ++host) {
    Stages steps;
    if (host == 0) {
      steps.across =
          step(levels_->column, request,
               {.what = Collective::AllGather, .inputs = request.inputs, .outputs = column});
    }
    steps.back = step(levels_->host_broadcast, request,
                      {.what = Collective::AllGather,
                       .inputs = {column[host]},
                       .outputs = of_host(outputs, static_cast<int>(host))});
    chunks.push_back(std::move(steps));
  }
  return chunks;
}

HostThenNet::Chunks HostThenNet::broadcast(const Request& request) {
  const int column = local_of(request.peer);
  Stages steps;
  if (local_ == column) {
    steps.across = step(
        levels_->column, request,
        {.what = Collective::Broadcast, .outputs = request.outputs, .peer = host_of(request.peer)});
  }
  steps.back = step(levels_->host_broadcast, request,
                    {.what = Collective::Broadcast, .outputs = request.outputs, .peer = column});
  return {steps};
}

HostThenNet::Chunks HostThenNet::barrier(const Request& request) {
  Stages steps;
  steps.within = step(levels_->host_reduce, request, {.what = Collective::Barrier});
  if (local_ == 0) steps.across = step(levels_->column, request, {.what = Collective::Barrier});
  steps.back = step(levels_->host_broadcast, request, {.what = Collective::Barrier});
  return {steps};
}

std::shared_ptr<Transport> HostThenNet::subset(const std::vector<int>& members, int color) {
  return levels_->guarded([&] {
    const WatchedProcesses here = levels_->host_reduce->processes();
    WatchedProcesses watched(members.size());
    for (size_t i = 0; i < members.size(); ++i) {
      if (!here.empty() && host_of(members[i]) == host_) watched[i] = here[local_of(members[i])];
    }
    return make_transport(store_.prefix(fmt::format("split/{}/{}", numbers_.collectives(), color)),
                          index_of(members, rank_), layout_.of(members), timeout_, make_net_,
                          watched);
  });
}

}  // namespace

std::shared_ptr<Transport> make_transport(const Store& store, int rank, const Topology& layout,
                                          milliseconds timeout, const MakeNet& make_net,
                                          const WatchedProcesses& watched) {
  const auto hosts = layout.by_host();
  if (hosts.size() == 1) {
    ShmOptions options{
        .timeout = timeout, .members = layout.members, .doors = layout.doors, .processes = watched};
    const LauncherStatus& status = *store.launcher_status();
    if (status.has_numbers()) options.called = numbers_of(options.members, status);
    return make_shm_transport(store, rank, layout.size(), std::move(options));
  }
  if (static_cast<int>(hosts.size()) == layout.size()) {
    return make_net(store, {.rank = rank, .members = layout.members});
  }
  return std::make_shared<HostThenNet>(store, rank, layout, timeout, make_net, watched);
}

}  // namespace lockstep::comm
