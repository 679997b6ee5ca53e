// The parameters and buffers of a module that are trained.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <unordered_set>
#include <vector>

#include "lockstep/checkpoint/module_ref.h"
#include "lockstep/comm/group.h"

namespace lockstep::parallel {

struct Named {
  std::string name;
  at::Tensor tensor;
  bool sparse = false;        // its gradient will be
  bool renormalised = false;  // by forward(): the table of an Embedding with max_norm
  // Of a running mean or variance: whether its BatchNorm layer is in training. Null of others.
  std::shared_ptr<const std::function<bool()>> trains = nullptr;
};

// The tables of the Embedding and EmbeddingBag layers with max_norm, which forward() scales.
std::unordered_set<const void*> renormalised_tables(const torch::nn::Module& module);

// The caller's options for some tensors, by name.
struct ModelNotes {
  std::vector<std::string> ignore;  // parameters and buffers that are left out
  std::vector<std::string>
      sparse;  // parameters with sparse gradients, beside those of Embedding layers
  std::string_view options = "DdpOptions";  // what errors call the options
};

// Each tensor once, under its first name, in registration order.
struct Model {
  std::vector<Named> parameters;
  std::vector<Named> buffers;
  // A note names a tensor that the module does not have, as an error's text. Another rank's module
  // may have it, so that verify() throws it on all.
  std::string unknown = {};

  static Model of(const ModuleRef& ref, const ModelNotes& notes = {});
  std::vector<Named> trainable() const;
  // Parameters, then buffers.
  std::vector<at::Tensor> tensors() const;
};

// The device on which the group communicates `tensor`: the tensor's own where the group carries it,
// else the group's.
at::Device communicated_on(const Group& group, const at::Tensor& tensor);

// Throws ConfigError on all ranks unless the model can be attached to on `device`, all ranks
// describe it and their options in the same way, and no rank has given a `complaint`. Messages
// begin with [who]. `options` is one line.
void verify(const Model& model, const Group& group, at::Device device, std::string complaint = {},
            std::string_view who = "ddp", const std::string& options = {});

// A kind, a name, and what has to agree, such as "parameter 'fc.weight': float32 [256, 784],
// trainable". Private to verify(), and its tests.
std::vector<std::string> describe(const Model& model);

// What a forward() writes to by its own batch, which ranks that have batches of their own must not
// train, as an error's text; empty without.
std::string rewritten_by_forward(const Model& model);

// The first difference between the ranks' descriptions, as an error's text; empty when there is
// none.
std::string first_difference(const std::vector<std::vector<std::string>>& ranks);

}  // namespace lockstep::parallel
