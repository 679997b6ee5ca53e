#include "parallel/ddp/reducer/backward_pass.h"

#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/function.h>

#include <memory>
#include <utility>

namespace lockstep::parallel {
namespace {

// The engine runs callbacks at the end of the innermost backward(), while the node that called it
// is still the current one; without a current node it was the outermost. It destroys them when that
// backward() returns to its caller: then the next outer one is current, and takes callbacks.
class Callback {
 public:
  Callback(std::function<void()> reached, std::function<void()> abandoned)
      : reached_(std::move(reached)), abandoned_(std::move(abandoned)) {}
  Callback(const Callback&) = delete;
  Callback& operator=(const Callback&) = delete;

  ~Callback() {
    if (state_ == State::Done) return;
    const bool has_outer = torch::autograd::get_current_graph_task_id() != -1;
    if (state_ == State::Nested && has_outer) {
      at_end_of_backward(std::move(reached_), std::move(abandoned_));
    } else {
      abandoned_();
    }
  }

  void run() {
    if (torch::autograd::get_current_node()) {
      state_ = State::Nested;
    } else {
      state_ = State::Done;
      reached_();
    }
  }

 private:
  enum class State { Waiting, Nested, Done };

  std::function<void()> reached_, abandoned_;
  State state_ = State::Waiting;
};

}  // namespace

void at_end_of_backward(std::function<void()> reached, std::function<void()> abandoned) {
  auto callback = std::make_shared<Callback>(std::move(reached), std::move(abandoned));
  torch::autograd::Engine::get_default_engine().queue_callback([callback] { callback->run(); });
}

}  // namespace lockstep::parallel
