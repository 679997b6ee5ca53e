// Detects changes of a module after Ddp was attached to it.
#pragma once

#include <string>
#include <vector>

#include "parallel/ddp/model.h"

namespace lockstep::parallel {

class AttachedModule {
 public:
  AttachedModule(ModuleRef module, ModelNotes notes);

  const Model& model() const { return model_; }
  const ModelNotes& notes() const { return notes_; }
  const ModuleRef& module() const { return module_; }

  // Takes buffers that were replaced by others of the same sizes, dtype and device into the model,
  // as forward() of a scripted module replaces those that it assigns to. Returns the model's.
  const std::vector<Named>& follow_buffers();

  // What has become different since construction, as an error's text; empty when nothing has, or
  // when the module has been destroyed. A parameter that was frozen since does not count: it gets
  // no gradients. Takes some ten nanoseconds a tensor when nothing has.
  std::string change();
  // The same without what to do about it.
  std::string difference();

  // Makes the gradients of all of the module's parameters undefined, also of those that were
  // ignored or came later. Returns whether any of those had one.
  bool zero_grad() const;

 private:
  // A parameter or buffer as it was.
  struct Was {
    at::Tensor tensor;
    at::ScalarType dtype;
    at::Device device;
    std::vector<int64_t> sizes;
    bool is_trainable;
  };

  static Was as_it_is(const at::Tensor& tensor);
  static bool is_same(const Was& was);
  bool has_same_tensors() const;
  // Where the module's `tensors`, of which `now` is made, are not those of model_.
  std::string difference(const Model& now, std::vector<at::Tensor> tensors);

  ModuleRef module_;
  ModelNotes notes_;
  Model model_;
  std::vector<Was> was_;             // of model_: parameters, then buffers
  std::vector<at::Tensor> tensors_;  // all of the module, ignored ones too
};

}  // namespace lockstep::parallel
