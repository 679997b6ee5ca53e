// What a transport must do. Private: users see Group.
#pragma once

#include <ATen/core/Tensor.h>

#include <chrono>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "comm/health/end.h"
#include "comm/host/processes.h"
#include "comm/unfinished.h"
#include "lockstep/comm/group.h"
#include "lockstep/comm/work.h"
#include "lockstep/core/shard.h"

namespace lockstep::comm {

enum class Collective : int {
  AllReduce,
  Reduce,
  ReduceScatter,
  AllGather,
  Broadcast,
  Gather,
  Scatter,
  AllToAll,
  Send,
  Recv,
  Barrier,
};

std::string_view name_of(Collective what);
std::string_view name_of(ReduceOp op);
// "all_reduce sum"; of a collective that combines nothing, its name alone.
std::string_view name_of(Collective what, ReduceOp op);
// "float32", as Python's torch says it.
std::string_view name_of(at::ScalarType dtype);
// Whether the collective combines elements.
bool reduces(Collective what);

// Where the elements are; some valid address for an empty tensor, too.
char* data_of(const at::Tensor& tensor);

// One call, checked by Group: tensors contiguous, of one dtype and on one device that the transport
// carries, lists of the right length, peer in range.
//   AllReduce, Reduce, Broadcast  outputs[0], in place; inputs empty
//   ReduceScatter                 outputs[0]; inputs: one contiguous tensor of all parts, or
//                                 size() tensors
//   AllGather                     inputs[0]; outputs: one contiguous tensor of all parts, or
//                                 size() tensors
//   Gather, Scatter               as AllGather, ReduceScatter with lists, which are empty except
//                                 on the root
//   AllToAll                      inputs and outputs: one tensor each, or size() tensors each
//   Send, Recv                    inputs[0], outputs[0]
// Groups over the partial sums of hosts take more inputs: gloo/transport.h and tcp/transport.h.
struct Request {
  Collective what = Collective::Barrier;
  std::vector<at::Tensor> inputs = {};
  std::vector<at::Tensor> outputs = {};
  ReduceOp op = ReduceOp::Sum;
  int peer = 0;  // root, receiver or sender
  int tag = 0;
  uint32_t call = 0;  // as the flight recorder counts; 0 when it does not record
  std::chrono::milliseconds timeout{0};
  std::string label = {};
  // As in CallOptions.
  struct Context {
    std::string name;
    uint32_t number = 0;
    uint32_t pass = 0;
    // "Ddp 2, pass 7"; nothing without a number.
    std::string text() const;
  };
  Context context = {};
  std::string advice = {};
  // Of a call that is a step of another: what announcements and errors show in its place.
  struct Whole {
    std::string name;
    int64_t count = 0;
    std::string list = {};  // as list_of() says it
    // As the step's errors call the rank: within a host the world's number, between hosts the
    // group's; -1 for none.
    int root = -1;
  };
  std::optional<Whole> step_of = std::nullopt;
  // The counts of the tensors that go as this one, if it stands for several.
  std::vector<int64_t> parts = {};
  // What Average divides by, if not by the number of ranks. Otherwise 0.
  int divide_by = 0;
  // What PreMulSum multiplies by; transports get tensors that are multiplied.
  double factor = 1;
  // ReduceScatter: outputs[j] is combined over the ranks of runs[j] only. Empty: over all, one
  // output.
  std::vector<Range> runs = {};

  // "all_reduce sum": the call, or the one it is a step of. Not longer than this object.
  std::string_view name() const { return step_of ? step_of->name : name_of(what, op); }
  // The one dtype of the call; Byte for a barrier.
  at::ScalarType dtype() const;
};

class Transport {
 public:
  Transport() : Transport(std::make_shared<Unfinished>(OwnProcess())) {}
  virtual ~Transport() { unfinished_->close(); }
  virtual std::string_view name() const = 0;
  virtual int rank() const = 0;
  virtual int size() const = 0;
  virtual std::chrono::milliseconds timeout() const = 0;
  virtual bool deterministic() const = 0;
  // The device whose tensors it carries besides the CPU's, if any.
  virtual at::Device device() const { return at::kCPU; }
  virtual bool carries(at::Device device) const {
    return device.is_cpu() || device == this->device();
  }
  // Whether some ranks are torch.distributed's.
  virtual bool has_python_ranks() const { return false; }
  uint32_t next_caller() { return ++callers_; }
  // The number of lanes over which a Ddp or Fsdp of the group sums instead of over ranks, while
  // there is one; 0: over ranks.
  int64_t lanes() const { return lanes_->number(); }
  void begin_lanes(int64_t lanes) {
    lanes_->own = lanes;
    ++lanes_->users;
  }
  void end_lanes() { --lanes_->users; }
  // Lanes of `group` are those of its parts, too: a layer may have a group of the same ranks of its
  // own.
  void share_lanes_of(const Transport& group) { lanes_->outer = group.lanes_; }
  // Starts the operation. May block (a transport without background progress runs it here or in
  // wait()).
  virtual Work start(Request&& request) = 0;
  // Lets operations under way progress without waiting, on transports without a thread of their
  // own. Throws CommError.
  virtual void move_on() {}
  // Called repeatedly while start() blocks. For a transport that is a part of another.
  virtual void set_idle_work(std::function<void()>) {}
  virtual at::Tensor empty(at::IntArrayRef sizes, at::TensorOptions options) = 0;
  // Undefined where ranks have no memory in common.
  virtual at::Tensor shared(at::IntArrayRef, at::TensorOptions) { return {}; }
  // Aborts the group: waiting calls, on any rank, throw an error that quotes `why`. Any thread.
  virtual void abort_all(std::string_view) noexcept {}
  // Why the group can no longer be used, as far as is known without waiting; nothing while it can.
  virtual std::optional<std::string> failure() { return std::nullopt; }
  // As Group::abort().
  void abort(std::string_view why) noexcept {
    if (aborted_.say(std::string(why))) abort_all(why);
  }
  std::optional<std::string> aborted() const { return aborted_.why(); }
  // The world's numbers of the ranks.
  std::vector<int> world_ranks() const;
  void set_world_ranks(std::vector<int> ranks) { world_ranks_ = std::move(ranks); }
  // Held by every rank while it, or another rank, forms a subset by way of the store: rank 0, which
  // serves the store, may exit meanwhile.
  virtual std::shared_ptr<void> making_subsets() { return nullptr; }
  // A transport of the same kind over `members` (ranks of this one, in the new order, this rank
  // among them). Called by the members only, after all ranks of this transport agreed on who they
  // are; `color` tells apart the subsets made at the same time.
  virtual std::shared_ptr<Transport> subset(const std::vector<int>& members, int color) = 0;
  // What is wrong with the network, as far as this rank can see; empty when nothing is.
  virtual std::string obstacle() const { return ""; }
  // By rank, the processes of this host whose end it notices; null for others. Empty where it
  // watches none.
  virtual WatchedProcesses processes() const { return {}; }

  const std::shared_ptr<Unfinished>& unfinished() const { return unfinished_; }

 protected:
  explicit Transport(std::shared_ptr<Unfinished> unfinished) : unfinished_(std::move(unfinished)) {}

 private:
  const std::shared_ptr<Unfinished> unfinished_;
  End aborted_;
  std::vector<int> world_ranks_;  // empty: as the ranks are
  uint32_t callers_ = 0;
  struct Lanes {
    int64_t number() const { return users > 0 ? own : outer ? outer->number() : 0; }

    int64_t own = 0;
    int users = 0;
    std::shared_ptr<const Lanes> outer;
  };
  const std::shared_ptr<Lanes> lanes_ = std::make_shared<Lanes>();
};

std::shared_ptr<Transport> make_solo_transport();

}  // namespace lockstep::comm
