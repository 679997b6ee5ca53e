// The memory of a parameter, allocated and freed while the tensor stays the same.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <string>

namespace lockstep::parallel {

// A parameter keeps its sizes always, because set_data() with others would corrupt gradients, and
// views that autograd has saved keep its storage. So it is the storage that is pointed at memory,
// and made to throw where it has none.
class ParameterMemory {
 public:
  // Gives the parameter a storage of its own, of `dtype` and hidden. Its values are gone. `message`
  // is what access then throws.
  ParameterMemory(const at::Tensor& parameter, at::ScalarType dtype, std::string message);

  // From element `begin` of a contiguous tensor of the parameter's dtype, which stays alive.
  void show(const at::Tensor& flat, int64_t begin);
  // From then on access throws. The memory is freed unless it is `Kept`.
  enum class Memory { Freed, Kept };
  void hide(Memory memory);
  // Frees the memory for good, with another message.
  void abandon(std::string message);
  bool is_shown() const { return shown_; }
  // Whether the parameter still has that storage: module.to() or set_data() give it another.
  bool is_attached() const;

 private:
  at::Tensor parameter_;
  c10::intrusive_ptr<c10::StorageImpl> storage_;
  std::string message_;
  bool shown_ = false;
  const void* place_ = nullptr;
};

// Whether a tensor may be read: not while an Fsdp hides it.
bool has_memory(const at::Tensor& tensor);

}  // namespace lockstep::parallel
