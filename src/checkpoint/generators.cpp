#include "checkpoint/generators.h"

#include <ATen/CPUGeneratorImpl.h>
#include <fmt/format.h>

#include <mutex>

#include "checkpoint/format/checksum.h"
#include "core/mix.h"

namespace lockstep::checkpoint {
namespace {

class Generators : public Stateful {
 public:
  explicit Generators(int rank) : rank_(rank) {}

  State state(const Names&) const override { return {.pieces = {piece(rank_, current())}}; }

  State destination(const Saved& saved, const Names&) override {
    source_ = rank_ < saved.world ? rank_ : 0;
    bytes_ = at::empty_like(current());
    return {.pieces = {piece(source_, bytes_)}, .others = {"cpu/rank-*"}};
  }

  void restored(const State&) override {
    at::Generator generator = at::detail::getDefaultCPUGenerator();
    const std::lock_guard lock(generator.mutex());
    if (source_ == rank_) {
      generator.set_state(bytes_);
      return;
    }
    // A rank that was not there: numbers that depend on the checkpoint and the rank alone.
    const std::string_view bytes(static_cast<const char*>(bytes_.const_data_ptr()), bytes_.numel());
    generator.set_current_seed(mix(checksum(bytes) ^ static_cast<uint64_t>(rank_)));
  }

 private:
  static at::Tensor current() {
    at::Generator generator = at::detail::getDefaultCPUGenerator();
    const std::lock_guard lock(generator.mutex());
    return generator.get_state();
  }
  static Piece piece(int rank, const at::Tensor& bytes) {
    Piece piece = whole_piece(fmt::format("cpu/rank-{}", rank), bytes);
    piece.held = Held::InParts;
    return piece;
  }

  int rank_;
  int source_ = 0;
  at::Tensor bytes_;
};

}  // namespace

std::shared_ptr<Stateful> generators(int rank) { return std::make_shared<Generators>(rank); }

}  // namespace lockstep::checkpoint
