// How an object describes to a checkpoint what has to be saved of it: as named tensors, of which
// this rank may hold parts, and named values.
#pragma once

#include <ATen/core/Tensor.h>

#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "lockstep/checkpoint/box.h"
#include "lockstep/checkpoint/manifest.h"

namespace lockstep::checkpoint {

// A box of a tensor, and its elements: a tensor of the box's sizes, with any strides, on any
// device.
struct Part {
  Box box;
  at::Tensor tensor;
};

// Which ranks have a tensor.
enum class Held {
  ByAll,    // every rank all of it, the same everywhere: each writes a part
  InParts,  // the ranks' parts together are the whole, each element once
};

// A tensor that is saved, and what this rank has of it.
struct Piece {
  std::string name;
  at::ScalarType dtype;
  Sizes sizes;  // of the whole
  std::vector<Part> parts;
  Held held = Held::ByAll;
};

// A piece of which every rank has all.
Piece whole_piece(std::string name, const at::Tensor& tensor);

// All that one object wants saved.
struct State {
  std::vector<Piece> pieces = {};
  Values values = {};  // the same on all ranks
  // Further names of pieces (tied parameters): name, and the piece's.
  std::map<std::string, std::string> aliases = {};
  // In destination(): patterns of further names that a checkpoint may have, such as those of other
  // ranks.
  std::vector<std::string> others = {};
};

// What a checkpoint has of an object.
struct Saved {
  // What the checkpoint has under a name.
  struct Tensor {
    at::ScalarType dtype;
    Sizes sizes;
  };
  std::map<std::string, Tensor> tensors;  // aliases too
  Values values;
  int64_t world = 1;  // ranks that saved
};

// What tracked modules call their parameters: "net/fc.weight".
class Names {
 public:
  // The first name of a tensor stays.
  void add(const at::Tensor& tensor, const std::string& name) {
    names_.try_emplace(tensor.unsafeGetTensorImpl(), name);
  }
  // A tensor's name; nothing when no tracked module has it.
  std::optional<std::string> of(const at::Tensor& tensor) const {
    const auto found = names_.find(tensor.unsafeGetTensorImpl());
    return found == names_.end() ? std::nullopt : std::optional(found->second);
  }

 private:
  std::map<const at::TensorImpl*, std::string> names_;
};

// Something that a checkpoint saves and restores. Called in the same way on every rank;
// communicates nothing; throws ConfigError or CheckpointError.
class Stateful {
 public:
  virtual ~Stateful() = default;

  // What there is to save now. Parts are the live tensors: they are read before save() returns.
  virtual State state(const Names& names) const = 0;

  // Where to put what was saved, with the same names: parts that this rank wants, each of any size,
  // and the names of the values that it expects. Called before anything is read. Names that are
  // missing on either side, other sizes and other dtypes are found by the caller. By default what
  // state() has.
  virtual State destination(const Saved&, const Names& names) { return state(names); }

  // The parts of destination() are filled, and the values are those saved. Called on all ranks
  // after all have verified what they read.
  virtual void restored(const State&) {}

  // Adds what others call the tensors of this one, which is tracked as `prefix`.
  virtual void add_names(const std::string&, Names&) const {}

  // The number of ranks whose parts make the whole, where it has to be all that save; else 0.
  virtual int divided_among() const { return 0; }
};

// The value of a name. Throws CheckpointError when it is missing or of another type.
template <class T>
T value_of(const Values& values, const std::string& name);

extern template bool value_of(const Values&, const std::string&);
extern template int64_t value_of(const Values&, const std::string&);
extern template double value_of(const Values&, const std::string&);
extern template std::string value_of(const Values&, const std::string&);
extern template std::vector<double> value_of(const Values&, const std::string&);

// libtorch's name for a dtype of the manifest, and back. Throw CheckpointError for one that has no
// counterpart.
at::ScalarType scalar_type_of(const std::string& dtype);
std::string dtype_of(at::ScalarType type);

}  // namespace lockstep::checkpoint
