// libtorch's data sets, and those that programs have written for libtorch's data loader.
#pragma once

#include <ATen/Functions.h>
#include <torch/data/datasets/base.h>
#include <torch/data/datasets/map.h>
#include <torch/data/datasets/shared.h>
#include <torch/data/example.h>

#include <concepts>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <type_traits>
#include <utility>
#include <vector>

#include "lockstep/data/dataset.h"
#include "lockstep/data/draws.h"

namespace lockstep::data {

// torch::data::datasets::Dataset, BatchDataset, MapDataset (what .map() gives), SharedBatchDataset
// ...
template <typename D>
concept AnyTorchDataset = requires {
  typename D::BatchType;
  typename D::BatchRequestType;
  { D::is_stateful } -> std::convertible_to<bool>;
};

// Those whose samples can be had by number.
template <typename D>
concept IndexedTorchDataset =
    AnyTorchDataset<D> && !D::is_stateful &&
    std::constructible_from<typename D::BatchRequestType, at::ArrayRef<size_t>>;

namespace torch_dataset {

namespace datasets = torch::data::datasets;

// Conversion of what they give.
template <typename T>
struct Example : std::false_type {};
template <typename Data, typename Target>
struct Example<torch::data::Example<Data, Target>>
    : std::bool_constant<std::is_same_v<Data, at::Tensor> &&
                         (std::is_same_v<Target, at::Tensor> || std::is_void_v<Target> ||
                          std::is_arithmetic_v<Target>)> {
  static at::Tensor target(const torch::data::Example<Data, Target>& example) {
    if constexpr (std::is_void_v<Target>) {
      return {};
    } else if constexpr (std::is_integral_v<Target> && !std::is_same_v<Target, bool>) {
      return at::scalar_tensor(static_cast<int64_t>(example.target),
                               at::kLong);  // as losses want classes
    } else if constexpr (std::is_arithmetic_v<Target>) {
      return at::scalar_tensor(example.target, c10::CppTypeToScalarType<Target>::value);
    } else {
      return example.target;
    }
  }
};
template <typename T>
struct Examples : std::false_type {};
template <typename T>
struct Examples<std::vector<T>> : Example<T> {};

// Whether a member function is libtorch's get_batch(), which calls get() for each sample.
template <typename F>
struct CallsGet : std::false_type {};
template <typename R, typename S, typename E, typename A>
struct CallsGet<R (datasets::Dataset<S, E>::*)(A)> : std::true_type {};

// Whether a batch is its samples' results one by one: then each draws its own random numbers. Not
// where the set has a get_batch() of its own, which may look at the batch as a whole.
template <typename D>
struct BySample : std::false_type {};
template <typename D>
requires requires {
  typename D::ExampleType;
  &D::get_batch;
}
struct BySample<D> : CallsGet<decltype(&D::get_batch)> {};
template <typename S, typename T>
    struct BySample<datasets::MapDataset<S, T>> : std::bool_constant <
                                                  BySample<S>::value&& requires {
  typename T::InputType;
  typename T::OutputType;
} > {};
template <typename U>
struct BySample<datasets::SharedBatchDataset<U>> : BySample<U> {};

// What this thread draws from now on belongs to the batch.
void draw_for_batch(size_t first);

template <typename D>
struct Reading {
  static typename D::BatchType read(D& set, const std::vector<size_t>& indices) {
    if constexpr (!BySample<D>::value) {
      return set.get_batch(at::ArrayRef<size_t>(indices));
    } else {
      typename D::BatchType batch;
      for (const size_t index : indices) {
        draw_for_sample(static_cast<int64_t>(index));
        for (auto& example : set.get_batch(at::ArrayRef<size_t>(index))) {
          batch.push_back(std::move(example));
        }
      }
      return batch;
    }
  }
};

// A map that needs the batch as a whole, of a set that may not.
template <typename S, typename T>
requires(!BySample<datasets::MapDataset<S, T>>::value) struct Reading<datasets::MapDataset<S, T>> {
  using Map = datasets::MapDataset<S, T>;
  static typename Map::BatchType read(Map& set, const std::vector<size_t>& indices) {
    // The map is not const, and lets us see what it consists of, but only as const.
    auto batch = Reading<S>::read(const_cast<S&>(set.dataset()), indices);
    if constexpr (BySample<S>::value) draw_for_batch(indices.front());
    return const_cast<T&>(set.transform()).apply_batch(std::move(batch));
  }
};

// The batch of these examples' tensors. Throws DataError unless all are of one kind.
Batch stack(const std::vector<at::Tensor>& data, const std::vector<at::Tensor>& target,
            at::IntArrayRef indices);
// Throws ConfigError when it is not known.
int64_t known(std::optional<size_t> size);
// Throws DataError when one is outside [0, size).
std::vector<size_t> checked(at::IntArrayRef indices, int64_t size);

}  // namespace torch_dataset

// Such a data set as one of ours. A batch is what Stack<> or another collation makes of it, or a
// std::vector of examples, which are stacked. Targets may be tensors, numbers (integers become
// int64) or none.
//
// What is drawn from libtorch's default generators for a sample, by the set or by what is mapped
// over its samples, belongs to (LoaderOptions::seed, epoch, sample) as in Transform; what a
// collation or a get_batch() of the set's own draws, to the batch.
//
// As with libtorch's data loader, threads that read at once have a copy of the set each; one that
// cannot be copied, or throws when it is, they read in turn.
template <IndexedTorchDataset D>
class TorchDataset : public Dataset {
  using Given = typename D::BatchType;
  static_assert(torch_dataset::Example<Given>::value || torch_dataset::Examples<Given>::value,
                "Lockstep's batches are a tensor of data and one of targets: map the data set to "
                "torch::data::Example<> (tuples and dicts of tensors become one with .map())");

 public:
  // Throws ConfigError for one that does not know its size.
  explicit TorchDataset(D set) : size_(torch_dataset::known(set.size())) {
    free_.push_back(std::make_unique<D>(std::move(set)));
  }

  int64_t size() const override { return size_; }

  Batch get_batch(at::IntArrayRef indices) const override {
    const auto wanted = torch_dataset::checked(indices, size_);
    const Reader reader(*this);
    auto given = torch_dataset::Reading<D>::read(*reader.set, wanted);
    if constexpr (torch_dataset::Example<Given>::value) {
      return {given.data, torch_dataset::Example<Given>::target(given)};
    } else {
      std::vector<at::Tensor> data, target;
      for (auto& example : given) {
        data.push_back(example.data);
        target.push_back(torch_dataset::Example<typename Given::value_type>::target(example));
      }
      return torch_dataset::stack(data, target, indices);
    }
  }

 private:
  // Has one of the sets to itself.
  struct Reader {
    explicit Reader(const TorchDataset& from) : owner(from) {
      std::unique_lock lock(owner.mutex_);
      ++owner.waiting_;
      owner.is_free_.wait(lock, [this] { return !owner.free_.empty(); });
      --owner.waiting_;
      set = std::move(owner.free_.back());
      owner.free_.pop_back();
    }
    ~Reader() {
      const std::lock_guard lock(owner.mutex_);
      if constexpr (std::copy_constructible<D>) {
        // Those that wait, more than there are sets for: so there are no more sets than threads.
        if (owner.waiting_ > std::ssize(owner.free_)) owner.add_copy_of(*set);
      }
      owner.free_.push_back(std::move(set));  // has room
      owner.is_free_.notify_all();
    }
    Reader(const Reader&) = delete;
    Reader& operator=(const Reader&) = delete;

    const TorchDataset& owner;
    std::unique_ptr<D> set;
  };

  // Where that fails there stay fewer sets than threads, which read in turn.
  void add_copy_of(const D& set) const noexcept {
    try {
      free_.reserve(sets_ + 1);
      free_.push_back(std::make_unique<D>(set));
      ++sets_;
    } catch (...) {
    }
  }

  const int64_t size_;
  mutable std::mutex mutex_;
  mutable std::condition_variable is_free_;
  mutable std::vector<std::unique_ptr<D>> free_;
  mutable size_t sets_ = 1;  // with those in use
  mutable int64_t waiting_ = 0;
};

// The data set for a Loader.
template <AnyTorchDataset D>
std::shared_ptr<const Dataset> from_torch(D set) {
  static_assert(
      IndexedTorchDataset<D>,
      "A Loader asks for samples by number. Stateful data sets (ChunkDataset) and streams "
      "cannot give them, so that it is not known which samples a rank has had: read the "
      "samples into a TensorDataset, or write a torch::data::datasets::Dataset whose "
      "get(index) reads one of them");
  return std::make_shared<const TorchDataset<D>>(std::move(set));
}

}  // namespace lockstep::data
