// Averages gradients over ranks while backward() still runs.
#pragma once

#include <memory>
#include <vector>

#include "lockstep/comm/group.h"
#include "lockstep/parallel/ddp.h"
#include "parallel/accumulator.h"
#include "parallel/buckets.h"
#include "parallel/packed.h"

namespace lockstep::parallel {

// One pass = one backward(): it begins with the first gradient that arrives outside hold() and
// finishes in a callback that the autograd engine runs before backward() returns. A bucket is
// started when its last gradient is in and all buckets before it are started, so that the ranks'
// collectives come in one order whatever order their gradients take.
class Reducer : public GradientListener, public std::enable_shared_from_this<Reducer> {
 public:
  // `buffers` is the caller's and outlives this; `holds` counts the guards that are alive.
  Reducer(const Group& group, std::vector<Named> parameters, const DdpOptions& options,
          Packed& buffers, std::shared_ptr<const int> holds);

  at::Tensor arriving(size_t parameter, const at::Tensor& gradient) override;
  void arrived(size_t parameter) override;

  const Buckets& buckets() const { return buckets_; }
  bool rebuilt() const { return rebuilt_; }
  // Forgets what was accumulated under hold().
  void forget();

 private:
  // Held by the engine's callback, so that a backward() that throws ends its pass too.
  struct Pass;
  enum class Step : uint8_t { Absent, Arriving, Ready };
  // A parameter this rank's backward did not reach, and its gradient from before if the bucket
  // holds it.
  struct Unreached {
    size_t parameter;
    at::Tensor before;
  };

  void begin();
  void launch(size_t bucket);
  void drive();
  void finish();
  std::vector<Unreached> contribute_unreached();
  void write_flags();
  void settle(const std::vector<Unreached>& unreached);
  void refuse_unreached() const;
  void rebuild();

  Group group_;
  std::vector<Named> parameters_;
  DdpOptions options_;
  Buckets buckets_;
  Packed& buffers_;
  std::shared_ptr<const int> holds_;
  std::vector<std::string> tags_;
  std::vector<char> held_;  // accumulated under hold() since the last pass
  bool rebuilt_ = false;

  // Of the pass.
  const Pass* pass_ = nullptr;  // none: no backward() is under way
  std::vector<Step> steps_;
  std::vector<size_t> order_;    // in which parameters became ready
  std::vector<size_t> waiting_;  // by bucket: parameters not yet ready
  size_t launched_ = 0;          // buckets
  std::vector<comm::Work> works_;
  size_t completed_ = 0;  // of works_, from the front
};

}  // namespace lockstep::parallel
