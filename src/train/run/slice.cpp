#include "train/run/slice.h"

#include <ATen/ATen.h>
#include <fmt/format.h>

#include <algorithm>
#include <map>
#include <numeric>
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

void refuse_unseen_classes(const data::Dataset& training, const data::Dataset& validation,
                           double fraction) {
  std::map<int64_t, int64_t> unseen;  // samples, by class
  each_class(validation, [&](int64_t label) {
    if (label >= 0) ++unseen[label];  // others do not count
    return false;
  });
  if (unseen.empty()) return;
  each_class(training, [&](int64_t label) {
    unseen.erase(label);
    return unseen.empty();
  });
  int64_t samples = 0;
  for (const auto& [label, count] : unseen) samples += count;
  if (2 * samples <= validation.size()) return;
  throw ConfigError(fmt::format(
      "[run] data.validation_fraction = {} holds out the last {} samples, of which {} are of "
      "classes that none of the {} to train on has, as class {}: the data are ordered by class. "
      "Shuffle the samples, or give data.validation_path",
      fraction, validation.size(), samples, training.size(), unseen.begin()->first));
}

}  // namespace lockstep::train
