// One backward(), also one that runs others inside (re-entrant checkpointing).
#pragma once

#include <functional>
#include <memory>
#include <utility>

namespace lockstep::parallel {

// Called within backward(). Runs `reached` when the outermost backward() of those under way on this
// thread has computed everything, before it returns; what `reached` throws, it throws. Runs
// `abandoned` when that backward() ends with an exception instead.
void at_end_of_backward(std::function<void()> reached, std::function<void()> abandoned);

// The state of one pass, as a member of the class that handles it.
class BackwardPass {
 public:
  bool is_open() const { return open_; }

  // Called within backward() by the owner, who has this as a member. At the end of the outermost
  // backward() the pass is closed, and then (owner->*finish)() runs, or (owner->*abort)() when that
  // backward() threw; neither runs when the owner is gone.
  template <class Owner>
  void begin(std::weak_ptr<Owner> owner, void (Owner::*finish)(), void (Owner::*abort)()) {
    open_ = true;
    const auto closing = [this, owner = std::move(owner)](void (Owner::*then)()) {
      return [this, owner, then] {
        const auto alive = owner.lock();
        if (!alive) return;
        open_ = false;
        (alive.get()->*then)();
      };
    };
    at_end_of_backward(closing(finish), closing(abort));
  }

 private:
  bool open_ = false;
};

}  // namespace lockstep::parallel
