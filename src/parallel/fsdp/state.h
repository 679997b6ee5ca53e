// Fsdp's work in forward and backward.
#pragma once

#include <deque>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "core/files/fd.h"
#include "data/loader/divided_order.h"
#include "lockstep/core/error.h"
#include "lockstep/parallel/call.h"
#include "lockstep/parallel/fsdp.h"
#include "lockstep/parallel/lanes.h"
#include "parallel/ddp/attached_module.h"
#include "parallel/ddp/buckets/usage_flags.h"
#include "parallel/ddp/buffers/buffers.h"
#include "parallel/ddp/reducer/accumulator.h"
#include "parallel/ddp/reducer/backward_pass.h"
#include "parallel/ddp/reducer/objection.h"
#include "parallel/fsdp/unit.h"
#include "parallel/lanes/plan.h"

namespace lockstep::parallel {

// A pass = one backward() outside hold(). Units' gradients are averaged in one order, which is that
// in which rank 0 had them complete in the first pass, so that all ranks' collectives come in one
// order. An error that one rank finds in a pass must not keep it from its collectives: it is
// recorded as an objection, which the end of the pass throws on all ranks.
class Fsdp::State : public GradientListener,
                    public LaneListener,
                    public std::enable_shared_from_this<State> {
 public:
  State(const ModuleRef& ref, const Group& group, FsdpOptions options);
  ~State() override;
  // Once there is a shared_ptr of it.
  void attach();

  at::Tensor arriving(size_t parameter, const at::Tensor& gradient) override;
  void arrived(size_t parameter) override;

  // lanes.cpp, with lanes
  void enter_lane(int64_t lane) override;
  void leave_lane() override;
  void end_lanes() override;
  // Null without.
  const std::shared_ptr<const LanePlan>& lane_plan() const { return lane_plan_; }

  const Model& model() const { return module_.model(); }
  const ModuleRef& module() const { return module_.module(); }
  const std::vector<std::unique_ptr<Unit>>& units() const { return units_; }
  const ShardPlan& plan() const { return plan_; }
  // A parameter's part.
  struct Place {
    Unit* unit;
    UnitFlat* flat;
    size_t member;
  };
  const Place& place(size_t parameter) const { return places_[parameter]; }

  void zero_grad();
  // Forgets gradients that were cleared through the module.
  void drop_cleared();
  std::shared_ptr<int> holds() const { return holds_; }
  void unshard();
  void reshard();
  bool is_whole() const { return whole_; }
  BufferSync& buffers() { return *buffers_; }
  // What a checkpoint has restored is read by the next forward.
  void shards_changed() { stale_ = true; }

 private:
  class Layer;
  struct Call;

  void materialize_undivided() const;
  std::string missing_room(Fd& held) const;
  void plan_groups(const Group& group);
  at::Device device() const;
  void check_model(const Group& group, const std::vector<PlannedUnit>& planned,
                   std::string complaint) const;
  void make_units(const std::vector<PlannedUnit>& planned);
  comm::CallOptions call(std::string_view label) const;
  void end_all_groups(const std::string& why) const;
  // Runs calls of a group that may be a part of all ranks. Where one fails, the others end, too:
  // their ranks would wait for this one until the deadline.
  template <class Calls>
  auto in_group(const Calls& calls) const {
    try {
      return calls();
    } catch (const CommError& error) {
      end_all_groups(error.what());
      throw;
    }
  }

  // forward.cpp
  CallLayer::Tensors forward(Unit& unit, const CallLayer::Tensors& inputs,
                             const CallLayer::Body& body);
  void begin_forward();
  void end_whole();
  void publish();
  void refuse_early_writes();
  void find_writes(Unit& unit);
  std::string take_objection_to_writes();
  void refuse_writes();
  bool is_written() const;
  void meet(std::string_view label);
  void refuse_other_dtype(const c10::Error& error);
  void watch_call(Unit& unit, const CallLayer::Tensors& inputs, const CallLayer::Tensors& outputs,
                  uint64_t since);
  CallLayer::Tensors cast(const CallLayer::Tensors& inputs) const;
  void open(Unit& unit);
  enum class After { Free, Reshard, Keep };
  void close(Unit& unit, After after);
  void gather(Unit& unit);
  void show(Unit& unit);
  void hide(Unit& unit);
  void prefetch(const Unit& unit, int step);
  void hide_unused();
  void wait_for_host();

  // backward.cpp
  void begin_backward();
  void before_backward(Unit& unit, Call& call);
  void after_backward(Unit& unit);
  void discount_calls();
  void end_backward();
  void abandon_backward();
  void guard(size_t parameter);
  void begin_pass();
  void complete(Unit& unit);
  void launch_ready();
  void launch(Unit& unit);
  void drive();
  void finish_oldest();
  void lend_memory(UnitFlat& flat);
  void finish_pass();
  void start_lane_average(UnitFlat& flat, const Unit& unit);
  void meet_before_lane_average();
  void finish_buffers();
  size_t count_flags() const;
  std::vector<char> told() const;
  bool object_to_differences(const std::vector<char>& mine, const std::vector<char>& any);
  void refuse_objected(bool differs);
  void object(std::string text) { objection_.add(std::move(text)); }
  void settle(const std::vector<char>& reached);
  void agree_on_order();

  // lanes.cpp
  bool is_in_lane() const { return lane_plan_ && lane_plan_->is_open(); }
  // Whether this backward() communicates.
  bool is_last_lane() const { return !lane_plan_ || lane_plan_->meets(); }
  void begin_lane_pass();
  void end_lane_pass();
  void open_for_lanes();
  void close_for_lanes();
  void reset_lanes();

  ShardPlan plan_;
  std::shared_ptr<const LanePlan> lane_plan_;
  AttachedModule module_;
  std::vector<std::unique_ptr<Unit>> units_;
  std::vector<Place> places_;       // by parameter
  std::vector<size_t> trainable_;   // parameters
  std::vector<at::Tensor> guards_;  // by parameter: its gradient, which throws
  std::vector<char> guarded_;       // by parameter: whether it was given that
  std::vector<ParameterMemory> guard_memory_;
  std::vector<std::unique_ptr<Layer>> layers_;
  std::vector<CallAttachment> attachments_;
  std::vector<Accumulator> accumulators_;
  std::optional<BufferSync> buffers_;
  std::optional<GradientMemory> memory_;
  UsageFlags::Counts flag_counts_;
  UsageFlags flags_;
  std::shared_ptr<int> holds_ = std::make_shared<int>(0);
  uint32_t caller_ = 0;

  int64_t next_lane_ = 0;          // the own lane whose backward() is the next to count
  bool lanes_complete_ = true;     // those of the step that began last
  bool lane_done_ = false;         // the one that a loop is in has had its backward()
  bool opened_for_lanes_ = false;  // parameters are whole for the step

  int depth_ = 0;                // calls under way
  bool stale_ = true;            // shards may have changed since publish()
  bool may_be_written_ = false;  // a forward under no_grad was the last, so they may have, too
  bool may_be_read_ = false;     // by another rank: no backward() since a forward
  bool whole_ = false;           // between unshard() and reshard()
  std::string written_;          // a parameter that the module's code has written to
  std::vector<Unit*> order_now_, order_before_;  // of calls in forward

  BackwardPass backward_;
  bool in_pass_ = false;
  uint32_t pass_ = 0;
  Objection objection_;
  std::vector<char> reached_;  // by parameter, in this pass or under hold() before it
  std::vector<char> arrived_;  // by parameter, in this backward
  std::vector<std::weak_ptr<Call>> fired_;
  std::vector<Unit*> reduce_order_, completed_order_;
  bool ordered_ = false;
  data::NewOrders orders_;  // of samples, to compare
  size_t launched_ = 0;
  std::deque<UnitFlat*> in_flight_;
  // In a rank's last lane: whether averages begin when ranks have met, and which wait for that.
  bool waits_ = false;
  std::vector<std::pair<UnitFlat*, const Unit*>> waiting_;
};

}  // namespace lockstep::parallel
