#include "lockstep/comm/work.h"

#include "lockstep/core/error.h"
#include "lockstep/core/flight.h"

namespace lockstep::comm {
namespace {

class Chain : public Pending {
 public:
  Chain(Work first, std::function<Work()> next) : first_(std::move(first)), next_(std::move(next)) {}

 private:
  void finish() override {
    first_.wait();
    next_().wait();
    next_ = nullptr;
  }
  // Drives the first; wait() has the rest to do in any case.
  bool advance() override {
    (void)first_.is_completed();
    return false;
  }

  Work first_;
  std::function<Work()> next_;
};

}  // namespace

void Pending::wait() {
  if (!over_) {
    over_ = true;
    const flight::Span blocked(flight::Activity::Communication, call_);
    try {
      finish();
      flight::end(call_);
    } catch (const CommError& error) {
      flight::report_failure(error.what(), flight::Blame::Peer);
      error_ = std::current_exception();
    } catch (...) {
      error_ = std::current_exception();
    }
  }
  if (error_) std::rethrow_exception(error_);
}

bool Pending::poll() {
  if (over_) return true;
  try {
    return advance();
  } catch (...) {
    error_ = std::current_exception();
    over_ = true;
    return true;
  }
}

Work then(Work first, std::function<Work()> next) {
  return Work(std::make_shared<Chain>(std::move(first), std::move(next)));
}

void Work::set_call(uint32_t call) const {
  if (pending_) {
    pending_->set_call(call);
  } else {
    flight::end(call);
  }
}

}  // namespace lockstep::comm
