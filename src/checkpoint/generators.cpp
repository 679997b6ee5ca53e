#include "checkpoint/generators.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Context.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <atomic>
#include <mutex>

#include "checkpoint/format/checksum.h"
#include "comm/transport.h"
#include "core/hash/mix.h"
#include "lockstep/core/log.h"

namespace lockstep::checkpoint {
namespace {

std::atomic<int64_t> g_restored{0};

class Generators : public Stateful {
 public:
  Generators(NamedGenerators all, const comm::Group& group)
      : all_(std::move(all)), group_(group), rank_(group.rank()) {}

  State state(const Names&) const override {
    State state;
    if (const int64_t lanes = group_.transport().lanes(); lanes > 0) state.values[kLanes] = lanes;
    for (const auto& [name, generator] : all_) {
      state.pieces.push_back(piece(name, rank_, current(generator)));
    }
    return state;
  }

  State destination(const Saved& saved, const Names&) override {
    State state;
    const auto lanes = saved.values.find(kLanes);
    if (lanes != saved.values.end()) state.values.insert(*lanes);
    alike_ = !state.values.empty() || group_.transport().lanes() > 0;
    source_ = rank_ < saved.world && !alike_ ? rank_ : 0;
    bytes_.clear();
    apart_.clear();
    for (const auto& [name, generator] : all_) {
      state.others.push_back(pattern_of(name) + "/rank-*");
      at::Tensor& bytes = bytes_.emplace_back();
      Piece one = piece(name, source_, at::empty_like(current(generator)));
      // Of nothing at all it is an error, as for all that is tracked.
      if (!saved.tensors.empty() && !saved.tensors.contains(one.name)) {
        apart_.push_back(fmt::format("'{}' was not saved", name));
        continue;
      }
      bytes = one.parts.front().tensor;
      state.pieces.push_back(std::move(one));
    }
    for (const auto& [path, tensor] : saved.tensors) {
      const std::string name = path.substr(0, path.find('/'));
      std::string of_ranks = pattern_of(name) + "/rank-*";
      if (std::ranges::find(state.others, of_ranks) != state.others.end()) continue;
      state.others.push_back(std::move(of_ranks));
      apart_.push_back(fmt::format("'{}' is not here", name));
    }
    return state;
  }

  void restored(const State&) override {
    for (size_t i = 0; i < all_.size(); ++i) {
      if (bytes_.at(i).defined()) restore(all_[i].second, bytes_[i]);
    }
    if (rank_ == 0 && !apart_.empty()) {
      log::warn(
          fmt::format("[checkpoint] of the random generators {}: what it would draw is not as in "
                      "the run that saved",
                      fmt::join(apart_, ", ")));
    }
    ++g_restored;
  }

 private:
  void restore(at::Generator generator, const at::Tensor& state) const {
    const std::lock_guard lock(generator.mutex());
    if (source_ == rank_ || alike_) {
      generator.set_state(state);
      return;
    }
    // A rank that was not there: numbers that depend on the checkpoint and the rank alone.
    const std::string_view bytes(static_cast<const char*>(state.const_data_ptr()), state.numel());
    generator.set_current_seed(mix(checksum(bytes) ^ static_cast<uint64_t>(rank_)));
  }
  static at::Tensor current(at::Generator generator) {
    const std::lock_guard lock(generator.mutex());
    return generator.get_state();
  }
  static Piece piece(const std::string& name, int rank, const at::Tensor& bytes) {
    Piece piece = whole_piece(fmt::format("{}/rank-{}", name, rank), bytes);
    piece.held = Held::InParts;
    return piece;
  }

  // How many lanes the ranks that saved had; not there without.
  static constexpr char kLanes[] = "lanes";

  NamedGenerators all_;
  comm::Group group_;
  int rank_;
  bool alike_ = false;
  int source_ = 0;
  // Between destination() and restored(): of each generator, undefined where it stays as it is; and
  // which are on one side only, as where one of the machines has no GPU.
  std::vector<at::Tensor> bytes_;
  std::vector<std::string> apart_;
};

}  // namespace

NamedGenerators default_generators() {
  NamedGenerators all{{"cpu", at::detail::getDefaultCPUGenerator()}};
  if (at::globalContext().hasCUDA()) {
    const auto device = c10::impl::VirtualGuardImpl(at::kCUDA).getDevice();
    all.emplace_back("cuda", at::globalContext().defaultGenerator(device));
  }
  return all;
}

std::shared_ptr<Stateful> generators(NamedGenerators all, const comm::Group& group) {
  return std::make_shared<Generators>(std::move(all), group);
}

int64_t generators_restored() { return g_restored.load(); }

}  // namespace lockstep::checkpoint
