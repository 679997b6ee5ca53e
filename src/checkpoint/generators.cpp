#include "checkpoint/generators.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Context.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <fmt/format.h>

#include <atomic>
#include <mutex>

#include "checkpoint/format/checksum.h"
#include "core/mix.h"

namespace lockstep::checkpoint {
namespace {

std::atomic<int64_t> g_restored{0};

class Generators : public Stateful {
 public:
  Generators(NamedGenerators all, int rank) : all_(std::move(all)), rank_(rank) {}

  State state(const Names&) const override {
    State state;
    for (const auto& [name, generator] : all_) {
      state.pieces.push_back(piece(name, rank_, current(generator)));
    }
    return state;
  }

  State destination(const Saved& saved, const Names&) override {
    source_ = rank_ < saved.world ? rank_ : 0;
    bytes_.clear();
    State state;
    for (const auto& [name, generator] : all_) {
      bytes_.push_back(at::empty_like(current(generator)));
      state.pieces.push_back(piece(name, source_, bytes_.back()));
      state.others.push_back(name + "/rank-*");
    }
    return state;
  }

  void restored(const State&) override {
    for (size_t i = 0; i < all_.size(); ++i) restore(all_[i].second, bytes_.at(i));
    ++g_restored;
  }

 private:
  void restore(at::Generator generator, const at::Tensor& state) const {
    const std::lock_guard lock(generator.mutex());
    if (source_ == rank_) {
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

  NamedGenerators all_;
  int rank_;
  int source_ = 0;
  std::vector<at::Tensor> bytes_;  // of each generator, between destination() and restored()
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

std::shared_ptr<Stateful> generators(NamedGenerators all, int rank) {
  return std::make_shared<Generators>(std::move(all), rank);
}

int64_t generators_restored() { return g_restored.load(); }

}  // namespace lockstep::checkpoint
