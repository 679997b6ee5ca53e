// The samples that a Trainer trains on or evaluates with.
#pragma once

#include <concepts>
#include <memory>
#include <utility>

#include "lockstep/data/dataset.h"
#include "lockstep/data/torch_dataset.h"

namespace lockstep::train {

// What torch::data::make_data_loader() gives.
template <typename L>
concept TorchLoader = requires(L& loader) {
  loader.begin();
  loader.end();
  loader.options().batch_size;
};

// A handle to a data::Dataset, or to one of libtorch's as it is (lockstep/data/torch_dataset.h).
class DataSource {
 public:
  // None.
  DataSource() = default;
  // Refers to the data set, which has to outlive the Trainer.
  DataSource(const data::Dataset& dataset)  // NOLINT(google-explicit-constructor)
      : dataset_(std::shared_ptr<const data::Dataset>(), &dataset) {}
  // Keeps it.
  DataSource(std::shared_ptr<const data::Dataset> dataset)  // NOLINT(google-explicit-constructor)
      : dataset_(std::move(dataset)) {}
  // As above, for a derived class.
  template <std::derived_from<data::Dataset> D>
  DataSource(std::shared_ptr<D> dataset)  // NOLINT(google-explicit-constructor)
      : dataset_(std::move(dataset)) {}
  // Keeps a copy, or what was moved here.
  template <std::derived_from<data::Dataset> D>
  DataSource(D&& temporary)  // NOLINT(google-explicit-constructor)
      : dataset_(std::make_shared<const D>(std::move(temporary))) {}
  // One of torch's own, as from_torch() takes it.
  template <data::AnyTorchDataset D>
  DataSource(D set)  // NOLINT(google-explicit-constructor)
      : dataset_(data::from_torch(std::move(set))) {}
  // A loader of torch's has chosen the order of the samples, and which rank has which, for the rest
  // of the run: give its data set; TrainerOptions::loader has what its options say.
  template <TorchLoader L>
  DataSource(const std::unique_ptr<L>& loader) = delete;

  // Whether there is one.
  explicit operator bool() const { return dataset_ != nullptr; }
  // The data set; null when there is none.
  const std::shared_ptr<const data::Dataset>& dataset() const { return dataset_; }

 private:
  std::shared_ptr<const data::Dataset> dataset_;
};

}  // namespace lockstep::train
