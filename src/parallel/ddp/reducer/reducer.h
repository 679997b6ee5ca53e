// Averages gradients over ranks while backward() still runs.
#pragma once

#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "data/loader/divided_order.h"
#include "lockstep/comm/group.h"
#include "lockstep/parallel/ddp.h"
#include "parallel/ddp/attached_module.h"
#include "parallel/ddp/buckets/buckets.h"
#include "parallel/ddp/buckets/schedule.h"
#include "parallel/ddp/buckets/usage_flags.h"
#include "parallel/ddp/buffers/buffers.h"
#include "parallel/ddp/join/state.h"
#include "parallel/ddp/reducer/accumulator.h"
#include "parallel/ddp/reducer/backward_pass.h"
#include "parallel/ddp/reducer/objection.h"
#include "parallel/ddp/reducer/pass_clock.h"
#include "parallel/ddp/reducer/pass_queue.h"
#include "parallel/ddp/reducer/sparse.h"
#include "parallel/lanes/gradients.h"

namespace lockstep::parallel {

// One pass = one backward(): it begins with the first gradient that arrives outside hold() and
// finishes before the outermost backward() returns (BackwardPass). Its gradients become complete
// one by one, and buckets are averaged as they are (BucketSchedule). What one rank finds wrong is
// thrown by finish() on all ranks (Objection).
class Reducer : public GradientListener,
                public LaneListener,
                public std::enable_shared_from_this<Reducer> {
 public:
  // Parameters are numbered: first those of `dense`, then those of `sparse`; greater numbers stand
  // for frozen ones. `module` and `buffers` are the caller's and outlive this; `holds` counts the
  // guards that are alive.
  Reducer(const Group& group, std::vector<Named> dense, const std::vector<Named>& sparse,
          const DdpOptions& options, AttachedModule& module, BufferSync& buffers,
          std::shared_ptr<const int> holds, std::shared_ptr<const LanePlan> plan);
  ~Reducer() override { queue_->remove(*this); }
  Reducer(const Reducer&) = delete;
  Reducer& operator=(const Reducer&) = delete;

  at::Tensor arriving(size_t parameter, const at::Tensor& gradient) override;
  void arrived(size_t parameter) override;
  std::shared_ptr<CommHook> hook() const override { return options_.hook; }

  // For PassQueue, which puts the passes of several Ddps in an order.
  uint32_t caller() const override { return caller_; }
  bool is_joined() const { return join_.is_joined(); }
  bool has_passed() const { return clock_.count() > 0; }
  void launch_due() {
    while (schedule_.is_due()) launch_next();
  }
  bool has_only_last() const { return schedule_.has_only_last(); }
  // At the end of backward(), one after the other.
  void launch_all_but_last();
  void finish_pass();
  // Or backward() threw.
  void abandon();

  // With a plan.
  void enter_lane(int64_t lane) override;
  void leave_lane() override;
  void end_lanes() override;

  const Buckets& buckets() const { return buckets_; }
  // Before a backward() under hold(), which no other part of this sees.
  void make_room() { buckets_.make_room(parameters_, others_); }
  bool rebuilt() const { return rebuilt_; }
  // Gradients were made undefined: forgets what was accumulated under hold(). More such calls
  // between two passes than before mean that this rank skipped a batch; the number of the next pass
  // then differs from the other ranks', which gives an error on all. Where no rank accumulates,
  // gradients from hold() that are zeroed were only looked at: calls up to that one are not
  // counted.
  void zeroed();
  // Before zeroed(), when parameters that are not Ddp's had gradients: throws on all ranks if the
  // module was changed and no pass has come since the last call. A backward() that reaches none of
  // the parameters that Ddp knows begins none.
  void refuse_unaveraged();
  // The names of parameters with gradients of hold() that no pass has averaged yet. Ddp::refresh()
  // tells them to the reducer that takes this one's place.
  std::vector<std::string> held() const;
  void keep_held(const std::vector<std::string>& names);
  void write(DdpLog& log) const;

  // From join() on a pass also finds out which ranks have gradients of their own for it.
  // `gate` may be null.
  void join(const JoinOptions& options, const JoinPlace& place, std::shared_ptr<JoinGate> gate) {
    join_.begin(options, std::move(gate));
    queue_->join(*this, place);
  }
  // For DdpOptions::check_same_every.
  void include_in_check(const torch::optim::Optimizer* optimizer) { optimizer_ = optimizer; }

  // Until leave(), which returns the ranks that were in the last backward() that any was in.
  std::vector<int> leave() { return join_.leave(); }
  // A pass without a backward() of this rank, with what it has accumulated under hold() since the
  // last. Its gradients become the average all the same. False when no rank was in a backward().
  bool shadow();

 private:
  using Step = BucketSchedule::Step;
  // A dense parameter this rank's backward did not reach, and its gradient from before if the
  // bucket holds it.
  struct Unreached {
    size_t parameter;
    at::Tensor before;
  };

  void begin();
  void forget();
  comm::CallOptions call(std::string_view label) const;
  // Of the module, which may replace its buffers.
  std::string change() {
    buffers_.follow(module_.follow_buffers());
    return module_.change();
  }
  // Refuses the pass, or the next one. The first objection counts.
  void object(std::string text) { objection_.add(std::move(text)); }
  void object_to_gradient(size_t parameter);
  void warn_of_history() const;
  void refuse_objected();
  // Whether the gradient could be copied to the parameter's place in a bucket as it is.
  bool fits(const at::Tensor& gradient, size_t parameter) const;
  void launch_next();
  void drive();
  void wait_for_works();
  void finish();
  void finish_abandoned();
  bool is_sparse(size_t parameter) const { return parameter >= dense_; }
  std::vector<char> reached() const;
  // Parameters that are not frozen and were not reached, or not by all lanes.
  std::vector<char> lacking() const;
  void contribute_unreached();
  void write_flags();
  void finish_buffers();
  UsageFlags::Presence presence() const;
  void note_prior(size_t parameter, bool is_reached);
  void find_present();
  // The ranks among which this pass averages.
  Group averaged_over() const;
  void average_sparse();
  at::Tensor sent_by(int source, const at::Tensor& parameter, const at::Tensor& own,
                     bool sparse) const;
  bool has_prior() const;
  void take_priors();
  void check_same();
  bool has_new_order() const;
  bool any_held() const;
  void note_accumulation();
  // Whether this pass may read flags, also on a device: from the fourth on a step may be captured.
  bool reads_flags() const { return flags_.elements().is_cpu() || pass_ <= 3; }
  bool is_in_lane() const { return plan_ && plan_->is_open(); }
  // Whether this backward() communicates with the other ranks.
  bool is_last_lane() const { return !plan_ || plan_->meets(); }
  void begin_lane();
  // A pass in which this rank communicates without a backward().
  void meet_without_backward();
  at::Tensor arriving_in_lane(size_t parameter, const at::Tensor& gradient);
  // Its gradient is what the lane contributes.
  void take_in_lane(size_t parameter);
  void complete_lane();
  // Gradients become what the lanes' averages are.
  void settle_lanes();
  void average_sparse_lanes();
  void make_lane_slots();
  // Forgets what the lanes of a step that was not finished have left.
  void abandon_lanes();
  void settle_unreached();
  void refuse_unreached() const;
  void end_refused_pass() const;
  void object_to_frozen();
  void rebuild();

  Group group_;
  std::vector<Named> parameters_;
  std::vector<Named> frozen_;       // when this was made
  std::vector<at::Tensor> others_;  // the module's, which no bucket has
  size_t dense_;                    // how many of them
  DdpOptions options_;
  AttachedModule& module_;
  UsageFlags::Counts flag_counts_;
  Buckets buckets_;
  UsageFlags flags_;
  SparseGradients sparse_;
  BufferSync& buffers_;
  std::shared_ptr<const int> holds_;
  std::shared_ptr<const LanePlan> plan_;  // both null without lanes
  std::unique_ptr<LaneGradients> lanes_;
  std::vector<std::string> tags_;
  uint32_t caller_;  // which Ddp of the group this is
  std::shared_ptr<PassQueue> queue_;
  uint32_t fingerprint_every_ = 0;         // passes of rank 0; 0: never
  uint32_t pass_ = 0;                      // passes so far that communicated
  int zeroed_ = 0, zeroed_in_a_pass_ = 0;  // calls since the last pass, and the most there were
  uint32_t skipped_ = 0;                   // batches since the last pass
  bool accumulates_ = false;               // some rank's pass had gradients from hold()
  std::vector<char> held_;                 // accumulated under hold() since the last pass
  bool rebuilt_ = false;
  bool warned_of_compiled_ = false;  // of a scripted module
  JoinState join_;
  PassClock clock_;
  const torch::optim::Optimizer* optimizer_ = nullptr;  // to compare
  int64_t unchecked_ = 0;   // passes that count since check_same() compared the ranks
  bool compared_ = false;   // the first of them is over
  data::NewOrders orders_;  // to compare

  // Of the pass.
  BackwardPass backward_;
  Objection objection_;
  bool quiet_ = false;    // the hook does not communicate
  bool shadows_ = false;  // this rank is in none
  std::vector<Unreached> unreached_;
  BucketSchedule schedule_;
  std::vector<comm::Work> works_;
  size_t completed_ = 0;  // of works_, from the front
};

}  // namespace lockstep::parallel
