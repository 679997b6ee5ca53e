// Averages gradients over ranks while backward() still runs.
#pragma once

#include <memory>
#include <optional>
#include <vector>

#include "lockstep/comm/group.h"
#include "lockstep/parallel/ddp.h"
#include "lockstep/parallel/join.h"
#include "parallel/accumulator.h"
#include "parallel/buckets.h"
#include "parallel/buffers.h"
#include "parallel/flags.h"
#include "parallel/pass_clock.h"
#include "parallel/sparse.h"

namespace lockstep::parallel {

// One pass = one backward(): it begins with the first gradient that arrives outside hold() and
// finishes in a callback that the autograd engine runs before backward() returns. A bucket is
// started when its last gradient is in and all buckets before it are started, so that the ranks'
// collectives come in one order whatever order their gradients take.
class Reducer : public GradientListener, public std::enable_shared_from_this<Reducer> {
 public:
  // Parameters are numbered: first those of `dense`, then those of `sparse`. `buffers` is the
  // caller's and outlives this; `holds` counts the guards that are alive.
  Reducer(const Group& group, std::vector<Named> dense, const std::vector<Named>& sparse,
          const DdpOptions& options, BufferSync& buffers, std::shared_ptr<const int> holds);

  at::Tensor arriving(size_t parameter, const at::Tensor& gradient) override;
  void arrived(size_t parameter) override;
  std::shared_ptr<CommHook> hook() const override { return options_.hook; }

  const Buckets& buckets() const { return buckets_; }
  bool rebuilt() const { return rebuilt_; }
  // Forgets what was accumulated under hold(); the next forward begins.
  void forget();
  void write(DdpLog& log) const;

  // From join() on a pass also finds out which ranks have gradients of their own for it.
  void join(const JoinOptions& options) { join_ = options; }
  // Until leave(), which returns the ranks that had some in the last pass in which any had.
  std::vector<int> leave();
  // A pass without any of this rank's. Its gradients become the average all the same. False when no
  // rank had some.
  bool shadow();

 private:
  // Held by the engine's callback, so that a backward() that throws ends its pass too.
  struct Pass;
  enum class Step : uint8_t { Absent, Arriving, Ready };
  // A dense parameter this rank's backward did not reach, and its gradient from before if the
  // bucket holds it.
  struct Unreached {
    size_t parameter;
    at::Tensor before;
  };

  void begin();
  void launch(size_t bucket);
  void drive();
  void wait_for_works();
  void finish();
  bool is_due(size_t bucket) const;
  // Nobody else, and no hook that looks: gradients stay where the autograd engine puts them.
  bool is_alone() const { return group_.size() == 1 && !options_.hook; }
  bool is_sparse(size_t parameter) const { return parameter >= dense_; }
  bool all_ready() const { return order_.size() == parameters_.size(); }
  std::vector<char> reached() const;
  std::vector<Unreached> contribute_unreached();
  void write_flags();
  void finish_buffers();
  void find_present();
  bool divides_by_present() const { return join_ && join_->divisor == Divisor::Active; }
  void settle(const std::vector<Unreached>& unreached);
  void refuse_unreached() const;
  void rebuild();

  Group group_;
  std::vector<Named> parameters_;
  size_t dense_;  // how many of them
  DdpOptions options_;
  Flags::Counts flag_counts_;
  Buckets buckets_;
  Flags flags_;
  SparseGradients sparse_;
  BufferSync& buffers_;
  std::shared_ptr<const int> holds_;
  std::vector<std::string> tags_;
  std::vector<char> held_;  // accumulated under hold() since the last pass
  bool rebuilt_ = false;
  bool buffers_change_ = false;  // some did in the last pass
  std::optional<JoinOptions> join_;
  std::vector<int> present_;  // all ranks, unless joined
  PassClock clock_;

  // Of the pass.
  const Pass* pass_ = nullptr;  // none: no backward() is under way
  bool quiet_ = false;          // the hook does not communicate
  bool shadows_ = false;
  bool somebody_ = false;  // some rank does not
  std::vector<Step> steps_;
  std::vector<size_t> order_;    // in which parameters became ready
  std::vector<size_t> waiting_;  // by bucket: parameters not yet ready
  size_t launched_ = 0;          // buckets
  std::vector<comm::Work> works_;
  size_t completed_ = 0;  // of works_, from the front
};

}  // namespace lockstep::parallel
