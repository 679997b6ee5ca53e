#include "train/slice.h"

#include <ATen/ATen.h>
#include <fmt/format.h>

#include <algorithm>
#include <map>
#include <numeric>
#include <optional>
#include <utility>

#include "lockstep/core/error.h"
#include "lockstep/data/image_folder.h"

namespace lockstep::train {
namespace {

constexpr int64_t kSamplesAtOnce = 4096;

// The samples of another data set in another order.
class Reordered : public data::Dataset {
 public:
  Reordered(std::shared_ptr<const data::Dataset> whole, std::vector<int64_t> order)
      : whole_(std::move(whole)), order_(std::move(order)) {}

  int64_t size() const override { return static_cast<int64_t>(order_.size()); }
  data::Batch get_batch(at::IntArrayRef indices) const override {
    std::vector<int64_t> all;
    for (const int64_t index : indices) {
      if (index < 0 || index >= size()) {
        throw DataError(fmt::format("[run] sample {} does not exist: there are {}", index, size()));
      }
      all.push_back(order_[static_cast<size_t>(index)]);
    }
    return whole_->get_batch(all);
  }

 private:
  std::shared_ptr<const data::Dataset> whole_;
  std::vector<int64_t> order_;
};

// The k-th of a class's n samples stands at (k + 1/2) / n of the whole.
std::vector<int64_t> order_of_turns(const std::vector<int64_t>& labels) {
  std::map<int64_t, int64_t> counts, seen;
  for (const int64_t label : labels) ++counts[label];
  std::vector<double> places;
  for (const int64_t label : labels) {
    places.push_back((static_cast<double>(seen[label]++) + 0.5) /
                     static_cast<double>(counts[label]));
  }
  std::vector<int64_t> order(labels.size());
  std::iota(order.begin(), order.end(), int64_t{0});
  std::stable_sort(order.begin(), order.end(), [&](int64_t a, int64_t b) {
    return places[static_cast<size_t>(a)] < places[static_cast<size_t>(b)];
  });
  return order;
}

// Calls look(class) for each sample, until it says that this is enough.
template <class Look>
void each_class(const data::Dataset& data, const Look& look) {
  for (int64_t begin = 0; begin < data.size(); begin += kSamplesAtOnce) {
    std::vector<int64_t> indices(
        static_cast<size_t>(std::min(kSamplesAtOnce, data.size() - begin)));
    std::iota(indices.begin(), indices.end(), begin);
    const at::Tensor target = data.get_batch(indices).target;
    if (!target.defined() || target.dim() != 1 || target.scalar_type() != at::kLong) return;
    const at::Tensor classes = target.contiguous();
    for (int64_t i = 0; i < classes.numel(); ++i) {
      if (look(classes.const_data_ptr<int64_t>()[i])) return;
    }
  }
}

}  // namespace

std::shared_ptr<const data::Dataset> with_classes_in_turns(
    std::shared_ptr<const data::Dataset> whole) {
  const auto* const images = dynamic_cast<const data::ImageFolder*>(whole.get());
  if (images == nullptr) return whole;
  auto order = order_of_turns(images->labels());
  return std::make_shared<Reordered>(std::move(whole), std::move(order));
}

void refuse_ordered_classes(const data::Dataset& whole, int64_t last_ones, double fraction) {
  constexpr int64_t kFewest = 20;  // samples that are not in order by chance
  if (whole.size() < kFewest) return;
  std::map<int64_t, int64_t> counts;
  std::optional<int64_t> before;
  bool is_ordered = true;
  each_class(whole, [&](int64_t label) {
    is_ordered = label == before || !counts.contains(label);
    ++counts[label];
    before = label;
    return !is_ordered;
  });
  const bool has_rare_one =
      std::ranges::any_of(counts, [](const auto& item) { return item.second < 2; });
  if (!is_ordered || counts.size() < 2 || has_rare_one) return;
  throw ConfigError(fmt::format(
      "[run] data.validation_fraction = {} holds out the last {} of {} samples, and they are "
      "ordered by class: all those of one of the {} classes are together, so that an evaluation "
      "would be of the last one or few. Shuffle the rows of the file (data.shuffle comes later), "
      "or give "
      "data.validation_path",
      fraction, last_ones, whole.size(), counts.size()));
}

}  // namespace lockstep::train
