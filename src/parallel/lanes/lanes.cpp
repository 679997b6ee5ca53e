#include "lockstep/parallel/lanes.h"

#include <ATen/ATen.h>
#include <fmt/format.h>

#include <mutex>
#include <thread>

#include "lockstep/core/error.h"
#include "lockstep/parallel/ddp.h"
#include "lockstep/parallel/fsdp.h"
#include "parallel/lanes/plan.h"

namespace lockstep::parallel {
namespace {

// The loops of this process that are in a lane, whose streams are of the same generators.
std::mutex g_mutex;
std::thread::id g_thread;  // of them, where there are any
int g_loops = 0;

}  // namespace

LaneTurn::LaneTurn(std::vector<std::shared_ptr<LaneListener>> listeners,
                   std::shared_ptr<const LanePlan> plan, StepKey key, at::Device device)
    : listeners_(std::move(listeners)),
      plan_(std::move(plan)),
      key_(key),
      device_(device),
      lane_(plan_->sum.lanes().begin) {
  if (plan_->open >= 0) {
    throw ConfigError("[lanes] a loop over lanes within another of the same model");
  }
  try {
    enter();
  } catch (...) {
    leave();  // the models that had entered it
    throw;
  }
}

LaneTurn::~LaneTurn() { leave(); }

bool LaneTurn::done() const { return lane_ == plan_->sum.lanes().end; }

void LaneTurn::next() {
  leave();
  ++lane_;
  if (!done()) return enter();
  for (const auto& listener : listeners_) listener->end_lanes();
}

void LaneTurn::enter() {
  {
    const std::lock_guard lock(g_mutex);
    if (g_loops > 0 && g_thread != std::this_thread::get_id()) {
      throw ConfigError(
          "[lanes] a loop over lanes while another thread of this process is in one: both would "
          "draw from libtorch's default generators, which all threads share, and no number would "
          "repeat. Let one thread at a time run such a loop");
    }
    stream_.emplace(Stream{.seed = key_.seed, .step = key_.step, .lane = lane_}, device_);
    g_thread = std::this_thread::get_id();
    ++g_loops;
  }
  for (const auto& listener : listeners_) listener->enter_lane(lane_);
}

void LaneTurn::leave() {
  if (done()) return;
  for (const auto& listener : listeners_) listener->leave_lane();
  const std::lock_guard lock(g_mutex);
  if (stream_) --g_loops;
  stream_.reset();
}

LaneMean::LaneMean(const Ddp& ddp) : plan_(ddp.plan()), sums_(plan_->own_lanes()) {}
LaneMean::LaneMean(const Fsdp& fsdp) : plan_(fsdp.plan()), sums_(plan_->own_lanes()) {}

void LaneMean::add(const at::Tensor& sum, int64_t count) {
  if (sum.numel() != 1) {
    throw ConfigError(
        fmt::format("[lanes] LaneMean of a tensor of {} elements: it must have one", sum.numel()));
  }
  add(sum.item<double>(), count);
}

void LaneMean::add(double sum, int64_t count) {
  if (plan_->open < 0 || count < 0) {
    throw ConfigError(fmt::format(
        "[lanes] LaneMean::add() with a count of {}{}: call it in a loop over ddp.lanes(), with a "
        "count of 0 or more",
        count, plan_->open < 0 ? " outside of a lane" : ""));
  }
  sums_[plan_->open].first += sum;
  sums_[plan_->open].second += static_cast<double>(count);
}

double LaneMean::mean() {
  if (plan_->open >= 0) {
    throw ConfigError("[lanes] LaneMean::mean() within a lane: call it after the loop");
  }
  std::vector<at::Tensor> slots;
  for (int slot = 0; slot < plan_->slots; ++slot) slots.push_back(at::zeros({2}, at::kDouble));
  for (int64_t own = 0; own < plan_->own_lanes(); ++own) {
    const auto& [sum, count] = sums_[own];
    plan_->place(own, at::tensor({sum, count}, at::kDouble),
                 [&](int slot) -> const at::Tensor& { return slots[slot]; });
  }
  slots.resize(plan_->sum.nodes().size());
  plan_->sum.average(slots, {.label = "LaneMean"}).wait();
  sums_.assign(sums_.size(), {});
  const double count = slots[0][1].item<double>();
  if (count > 0) return slots[0][0].item<double>() / count;
  throw ConfigError("[lanes] LaneMean::mean() of nothing: add a value in every lane");
}

}  // namespace lockstep::parallel
