// The parameters of one unit: their memory, their shards, and their gradients' way to them.
#pragma once

#include <c10/core/Event.h>
#include <c10/core/Stream.h>

#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "lockstep/comm/group.h"
#include "lockstep/core/shard.h"
#include "lockstep/parallel/call.h"
#include "lockstep/parallel/fsdp.h"
#include "parallel/ddp/model.h"
#include "parallel/fsdp/parameter_memory.h"
#include "parallel/fsdp/plan_units.h"
#include "parallel/lanes/plan.h"
#include "parallel/layout/flat_layout.h"

namespace lockstep::parallel {

// What all units have in common.
struct ShardPlan {
  Group all;
  Group shards;         // over which the model is sharded
  Group replicas;       // ranks with the same part; alone unless there are several shard groups
  bool shares = false;  // one copy of the parameters for all ranks of `shards`
  std::optional<Group> resharded;  // over which parameters stay sharded after forward
  FsdpOptions options;

  // Whether other ranks read this rank's shards where they lie.
  bool others_read() const { return shares && shards.size() > 1; }
  // Memory of one dimension for what belongs on a device, where shards are to lie.
  at::Tensor memory_of_shards(int64_t count, const at::TensorOptions& options) const;
};

// Copies between the host's memory and a device, which the host has not waited for.
class HostCopies {
 public:
  // Those that were enqueued on the device's current stream so far.
  void note(at::Device device);
  void wait();

 private:
  std::vector<std::pair<c10::Stream, c10::Event>> events_;  // one for each stream
};

// Memory for the gradients of units while backward() computes them: lent, and given back.
class GradientMemory {
 public:
  // Every rank calls it. `sizes` in bytes.
  GradientMemory(const Group& group, at::Device device, const std::vector<int64_t>& sizes);

  // Undefined when all that is large enough is lent.
  at::Tensor lend(int64_t bytes);
  // Memory that is not its own is freed.
  void take_back(const at::Tensor& memory);

 private:
  struct Block {
    at::Tensor memory;
    bool lent = false;
  };
  std::vector<Block> blocks_;
};

// A unit's parameters of one dtype that are all trainable, or all frozen.
class UnitFlat {
 public:
  // `members` are numbers of the model's parameters. Every rank constructs it: the shards become
  // parts of rank 0's parameters, and the parameters are hidden.
  UnitFlat(const ShardPlan& plan, const Model& model, std::vector<size_t> members,
           std::string_view unit);

  const FlatLayout& layout() const { return layout_; }
  const std::vector<size_t>& members() const { return members_; }
  bool is_trainable() const { return trainable_; }
  int64_t gradient_bytes() const;
  // What forward and backward compute on; shards may lie elsewhere.
  at::Device device() const { return device_; }
  const Range& own() const { return own_; }

  // By member: this rank's part as an optimizer's leaf, and which of the parameter's elements.
  const at::Tensor& leaf(size_t member) const { return leaves_[member]; }
  const Range& range(size_t member) const { return ranges_[member]; }

  // What the optimizer may have written to the shards becomes what forward() computes with. Where
  // ranks share one memory, the others see it after the next synchronisation.
  void publish();
  // The part of publish() that leaves no trace in versions.
  void share_values();
  // Versions of parameters move where those of their shards have, so that autograd refuses a graph
  // that has saved what was there before.
  void count_writes();
  // The name of a parameter whose values were changed through the module since the last call, or
  // "". Writes by data() cannot be seen, because they count no version.
  std::string take_written();
  // Whether autograd has seen a shard change since publish().
  bool is_written() const;
  // Throws ConfigError for a leaf that its owner has taken other memory for, or has frozen or
  // unfrozen.
  void check_leaves() const;
  // The shards may be written and the gradients read when it returns.
  void wait_for_host() { copies_.wait(); }
  // Gathers, where ranks share no memory.
  void start_gather(const comm::CallOptions& options);
  void show();
  void hide();
  // The Fsdp goes, and with it what other ranks have of the parameters.
  void abandon();
  // The other way for shared memory: shown parameters stay in it.
  void note_common() const;
  // Before hide(): the next gather is among ShardPlan::resharded, until publish() or drop_nearby().
  void keep_nearby();
  void drop_nearby() { nearby_ = at::Tensor(); }
  // Of a parameter that was converted or replaced: its name, else "".
  std::string detached(const Model& model) const;

  // Adds to the member's gradient of this pass, or of what hold() has accumulated.
  void add_gradient(size_t member, const at::Tensor& gradient);
  // Whether there is memory to add to.
  bool has_gradients() const { return gradients_.defined(); }
  void use(at::Tensor memory);
  bool has(size_t member) const { return have_[member]; }
  // Starts the average into this rank's part; then wait for it. `work` is over when the memory is
  // free again.
  void start_reduce(const comm::CallOptions& options);
  bool advance_reduce();
  // With lanes: memory for their sums, which every rank makes; then for each own lane the gradients
  // of the pass are added, and after the last the average over all lanes is started, in the place
  // of start_reduce().
  void make_lane_slots(const LanePlan& plan);
  void place_lane(const LanePlan& plan, int64_t own_lane);
  void start_lane_average(const LanePlan& plan, const comm::CallOptions& options);
  at::Tensor finish_reduce();
  // The average becomes the gradient of the leaves of which some rank has one.
  void settle(const std::vector<char>& reached);
  // Discards what was accumulated; returns its memory.
  at::Tensor drop_gradients();
  // Discards that of one member, and its leaf's gradient.
  void drop_gradient(size_t member);
  void zero_grad();

 private:
  // Of this rank's elements, the member's.
  at::Tensor part_of(const at::Tensor& own, size_t member) const;
  static std::vector<at::Tensor> parts_of(const at::Tensor& flat, const std::vector<int64_t>& cuts);
  void start_second_reduce();
  void clear_absent();
  at::TensorOptions options_of(at::ScalarType dtype) const {
    return at::TensorOptions(dtype).device(device());
  }
  void prepare_average();
  // Whether the program refers to a gradient that a leaf had, which keeps its values, or has
  // changed its memory or requires_grad.
  bool others_have_averages() const;
  bool averages_in_place() const;
  void bring_to_shard();

  const ShardPlan& plan_;
  std::vector<size_t> members_;
  std::vector<at::Tensor> parameters_;
  at::Device device_ = at::kCPU;  // theirs; the pass's end refuses a module that has been moved
  std::vector<ParameterMemory> memory_;
  FlatLayout layout_;
  bool trainable_;
  at::ScalarType compute_, reduce_;
  std::vector<int64_t> cuts_, nearby_cuts_;
  Range own_;
  std::string unit_;

  at::Tensor shared_;    // all elements, for all ranks
  at::Tensor gathered_;  // while shown
  at::Tensor nearby_;    // this rank's elements among ShardPlan::resharded, after forward
  at::Tensor shard_;     // this rank's elements, in the module's own dtype
  std::vector<at::Tensor> leaves_;
  // By member, the leaf's version: at the last publish(), and at the last count_writes().
  std::vector<int64_t> published_, counted_;
  std::vector<int64_t> seen_;  // by member, the parameter's version that is known
  std::vector<Range> ranges_;
  comm::Work gather_;
  HostCopies copies_;

  at::Tensor gradients_;  // all elements of this rank's own
  std::vector<char> have_;
  at::Tensor average_;                     // of this rank's elements, as the leaves' gradients
  std::vector<at::Tensor> average_parts_;  // those, by member
  at::Tensor received_;  // the same as it comes, where that is not average_ itself
  comm::Work reduce_work_;
  bool second_ = false;  // the replicas' sum is under way
  std::string label_;
  std::vector<at::Tensor> lane_slots_;  // as LanePlan has them; none without lanes
};

// Of calls of a unit. Their graphs may outlast it.
struct CallCounts {
  int live = 0;     // whose graph may run backward
  int running = 0;  // whose nodes backward is running
};

// A module, and what is attached to its calls.
struct Unit {
  std::string name;     // "the root unit", "unit 'blocks.3'"
  uint32_t number = 0;  // from 1
  PlannedUnit planned;
  std::vector<UnitFlat> flats;
  bool is_root = false;

  // How many of its parameters are.
  size_t trainable() const;

  int uses = 0;  // calls and passes that need the parameters
  bool shown = false;
  bool gathering = false;  // ahead
  bool backward_open = false;
  std::shared_ptr<CallCounts> calls = std::make_shared<CallCounts>();
  int fired = 0;         // calls of which backward has begun, in this pass
  size_t missing = 0;    // trainable parameters without a gradient in this pass
  bool reduced = false;  // its averages are on their way
  bool ready = false;
};

}  // namespace lockstep::parallel
