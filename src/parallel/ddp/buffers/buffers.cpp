#include "parallel/ddp/buffers/buffers.h"

#include <fmt/format.h>
#include <torch/types.h>

#include <algorithm>
#include <cstring>
#include <map>
#include <numeric>

#include "comm/device/capture.h"
#include "lockstep/core/log.h"
#include "parallel/layout/flat_memory.h"

namespace lockstep::parallel {
namespace {

// Whether it is averaged, and not broadcast: tensors of dtypes that collectives can add.
bool is_averaged(const at::Tensor& tensor, Buffers mode) {
  const at::ScalarType real = c10::toRealValueType(tensor.scalar_type());
  return mode == Buffers::Average &&
         (real == at::kFloat || real == at::kDouble || real == at::kHalf || real == at::kBFloat16);
}

std::vector<at::Tensor> broadcast_ones(const std::vector<Named>& buffers, Buffers mode) {
  std::vector<at::Tensor> tensors;
  for (const auto& item : buffers) {
    if (!is_averaged(item.tensor, mode)) tensors.push_back(item.tensor);
  }
  return tensors;
}

}  // namespace

bool same_bytes(const at::Tensor& tensor, const at::Tensor& elements) {
  const auto plain = [](const at::Tensor& any) {
    return any.resolve_conj().resolve_neg().contiguous();
  };
  const at::Tensor own = plain(own_elements(tensor)), other = plain(elements);
  return own.scalar_type() == other.scalar_type() && own.sizes() == other.sizes() &&
         (own.nbytes() == 0 ||
          std::memcmp(own.const_data_ptr(), other.const_data_ptr(), own.nbytes()) == 0);
}

std::vector<int> all_ranks(const Group& group) {
  std::vector<int> ranks(group.size());
  std::iota(ranks.begin(), ranks.end(), 0);
  return ranks;
}

BufferSync::BufferSync(const Group& group, std::vector<Named> buffers, Buffers mode)
    : group_(group),
      buffers_(std::move(buffers)),
      places_(buffers_.size()),
      copied_(group, broadcast_ones(buffers_, mode)),
      mode_(mode) {
  const at::NoGradGuard no_grad;
  std::map<at::ScalarType, Flat> by_dtype;
  size_t copied = 0;
  for (size_t i = 0; i < buffers_.size(); ++i) {
    const at::Tensor& tensor = buffers_[i].tensor;
    if (is_averaged(tensor, mode)) {
      Flat& flat =
          by_dtype.try_emplace(tensor.scalar_type(), Flat{FlatLayout::packed(tensor.scalar_type())})
              .first->second;
      flat.layout.add(buffers_[i].name, own_elements(tensor).numel());
      flat.members.push_back(i);
      averaged_buffers_.push_back(i);
    } else {
      places_[i] = copied_.region(copied++);
    }
  }
  for (auto& [dtype, averaged] : by_dtype) {
    const auto options =
        buffers_[averaged.members.front()].tensor.options().dtype(c10::toRealValueType(dtype));
    averaged.flat = group.empty({averaged.layout.reals()}, options.requires_grad(false));
    const auto places = places_in(averaged, averaged.flat);
    for (size_t m = 0; m < places.size(); ++m) places_[averaged.members[m]] = places[m];
    averaged_.push_back(std::move(averaged));
  }
  for (size_t i = 0; i < buffers_.size(); ++i) places_[i].copy_(own_elements(buffers_[i].tensor));
}

void BufferSync::follow(const std::vector<Named>& now) {
  size_t copied = 0;
  for (size_t i = 0; i < buffers_.size(); ++i) {
    const bool is_copied = !is_averaged(buffers_[i].tensor, mode_);
    if (!buffers_[i].tensor.is_same(now[i].tensor)) {
      buffers_[i] = now[i];
      // forward() may have kept a part of what it returned, which the program still uses.
      const at::Tensor& tensor = now[i].tensor;
      if (tensor.storage().use_count() > 1) tensor.set_data(tensor.detach().clone());
      if (is_copied) copied_.replace(copied, now[i].tensor);
    }
    if (is_copied) ++copied;
  }
}

std::vector<at::Tensor> BufferSync::places_in(const Flat& averaged, const at::Tensor& flat) const {
  const at::Tensor elements = as_elements(flat, averaged.layout.dtype());
  std::vector<at::Tensor> places;
  for (size_t m = 0; m < averaged.members.size(); ++m) {
    const at::Tensor own = own_elements(buffers_[averaged.members[m]].tensor);
    places.push_back(member_of(elements, averaged.layout, m).view(own.sizes()));
  }
  return places;
}

const std::vector<char>& BufferSync::find_changed() {
  comm::refuse_capture(buffers_.front().tensor.device(), "[ddp] backward()",
                       "which ranks have changed buffers is seen by hosts: use Buffers::None");
  if (lanes_) return changed_ = lanes_->changed;
  compare();
  return changed_;
}

void BufferSync::compare() {
  changed_.resize(buffers_.size());
  for (size_t i = 0; i < buffers_.size(); ++i) {
    const at::Tensor& tensor = buffers_[i].tensor;
    changed_[i] = !tensor.is_cpu() || !same_bytes(tensor, places_[i]);
  }
}

void BufferSync::start(const std::vector<int>& present) {
  const at::NoGradGuard no_grad;
  divisor_ = static_cast<int64_t>(present.size());
  const bool counts = std::ranges::find(present, group_.rank()) != present.end();
  copied_.start(present.front(), "buffers");
  for (const size_t i : averaged_buffers_) places_[i].copy_(own_elements(buffers_[i].tensor));
  for (auto& averaged : averaged_) {
    if (!counts) averaged.flat.zero_();
    averaged.work = group_.all_reduce(averaged.flat, ReduceOp::Sum, {.label = "buffers"});
  }
}

// The layer writes to its running statistics without counting a version, because the gradient in
// training does not depend on them: two forwards may come before their backwards. So it is here.
void BufferSync::write(size_t buffer, const at::Tensor& value) const {
  const Named& item = buffers_[buffer];
  const bool counts = !item.trains || !(*item.trains)();
  own_elements(counts ? item.tensor : item.tensor.variable_data()).copy_(value);
}

void BufferSync::finish(const std::vector<double>& shares) {
  const at::NoGradGuard no_grad;
  copied_.wait();
  for (auto& averaged : averaged_) {
    averaged.work.wait();
    averaged.flat.div_(divisor_);
  }
  // The average of equal numbers may be rounded, and what is unchanged is to stay so.
  for (const size_t i : averaged_buffers_) {
    if (shares[i] == 0) places_[i].copy_(own_elements(buffers_[i].tensor));
  }
  for (size_t i = 0; i < buffers_.size(); ++i) {
    if (shares[i] > 0) write(i);
  }
}

void BufferSync::warn_of_own_changes(const std::vector<double>& shares) {
  if (mode_ != Buffers::Broadcast || warned_) return;
  for (size_t i = 0; i < buffers_.size(); ++i) {
    if (!changed_[i] || shares[i] > 0.99) continue;  // shares may come in bfloat16
    warned_ = true;
    return log::warn(fmt::format(
        "[ddp] buffer '{}' was changed on this rank since the last backward(), but not on all "
        "ranks; it is rank 0's from now on. Where forward() changes it, as that of an observer "
        "does whose value may also stay as it is, nothing is wrong. Else the ranks' values "
        "differed in this forward: change it in the same way on all ranks, or call "
        "sync_buffers() before forward()",
        buffers_[i].name));
  }
}

void BufferSync::sync() {
  if (buffers_.empty()) return;
  compare();
  const auto& mine = changed_;
  std::vector<double> shares(mine.size());
  for (const auto& theirs :
       group_.all_gather_bytes({mine.data(), mine.size()}, {.label = "buffers: which changed"})) {
    for (size_t i = 0; i < shares.size(); ++i) shares[i] += theirs[i];
  }
  if (std::ranges::max(shares) == 0) return;
  start(all_ranks(group_));
  finish(shares);
}

}  // namespace lockstep::parallel
