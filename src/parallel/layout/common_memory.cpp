#include "parallel/layout/common_memory.h"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>

#include <algorithm>
#include <mutex>

namespace lockstep::parallel {
namespace {

// The storages of one kind that some tensor still has.
class Known {
 public:
  void add(const at::Tensor& tensor) {
    const std::lock_guard lock(mutex_);
    std::erase_if(storages_, [](const auto& storage) { return storage.expired(); });
    if (!find(tensor)) storages_.push_back(tensor.storage().getWeakStorageImpl());
  }
  void remove(const at::Tensor& tensor) {
    const std::lock_guard lock(mutex_);
    std::erase_if(storages_, [&](const auto& storage) {
      return storage.lock().get() == tensor.storage().unsafeGetStorageImpl();
    });
  }
  bool has(const at::Tensor& tensor) const {
    const std::lock_guard lock(mutex_);
    return find(tensor);
  }

 private:
  bool find(const at::Tensor& tensor) const {
    return tensor.has_storage() && std::ranges::any_of(storages_, [&](const auto& storage) {
             return storage.lock().get() == tensor.storage().unsafeGetStorageImpl();
           });
  }

  mutable std::mutex mutex_;
  std::vector<c10::weak_intrusive_ptr<c10::StorageImpl>> storages_;
};

Known& left() {
  static auto& all = *new Known;
  return all;
}

Known& in_use() {
  static auto& all = *new Known;
  return all;
}

Known& unsharded() {
  static auto& all = *new Known;
  return all;
}

}  // namespace

void note_common(const at::Tensor& tensor) {
  if (tensor.has_storage()) left().add(tensor);
}

void note_shared(const at::Tensor& tensor) { in_use().add(tensor); }

bool is_common(const at::Tensor& tensor) { return in_use().has(tensor) || left().has(tensor); }

void note_unsharded(const at::Tensor& shard) { unsharded().add(shard); }
void forget_unsharded(const at::Tensor& shard) { unsharded().remove(shard); }
bool is_unsharded(const at::Tensor& shard) { return unsharded().has(shard); }

void take_own_copies(const std::vector<std::pair<std::string, at::Tensor>>& tensors) {
  const at::NoGradGuard no_grad;
  for (const auto& [name, tensor] : tensors) {
    if (left().has(tensor)) tensor.set_data(tensor.detach().clone());
  }
}

}  // namespace lockstep::parallel
