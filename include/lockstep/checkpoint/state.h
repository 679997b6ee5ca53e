// How an object describes to a checkpoint what has to be saved of it: as named tensors, of which
// this rank may hold parts, and named values.
#pragma once

#include <ATen/core/Tensor.h>

#include <map>
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
  bool is_copy = false;  // of parts that another rank saves, too; they are restored on both
};

// A piece of which every rank has all, as one part.
Piece whole_piece(std::string name, const at::Tensor& tensor);

// What an optimizer keeps of a parameter: `values` has an element for each of the parameter's, in
// the same sizes. Of a parameter of an Fsdp, which has this rank's part, they are this rank's part
// of the whole, so that Ddp and Fsdp restore each other's on any number of ranks. Throws
// ConfigError for other sizes, and for an undefined tensor.
Piece piece_of_parameter(std::string name, const at::Tensor& parameter, const at::Tensor& values);

// The pattern that matches this name alone: "*", "?", "[", "]" and "\" of it are escaped.
std::string pattern_of(const std::string& name);

// All that one object wants saved.
struct State {
  std::vector<Piece> pieces = {};
  Values values = {};  // the same on all ranks
  // Further names of pieces (tied parameters): name, and the piece's.
  std::map<std::string, std::string> aliases = {};
  // In destination(): patterns of further names that a checkpoint may have, such as those of other
  // ranks. A name that is meant literally goes through pattern_of().
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

  // Whether it has a value of the name and the type of each of these.
  bool has_like(const Values& others) const;
};

// What tracked modules call their parameters: "net/fc.weight".
class Names {
 public:
  // A tied tensor has several; the first one that is added is the one of state().
  void add(const at::Tensor& tensor, const std::string& name);
  // For each tensor that has a name which is a key here, the value as another name.
  void add_aliases(const std::map<std::string, std::string>& aliases);
  // A tensor's first name; nothing when no tracked module has it.
  std::optional<std::string> of(const at::Tensor& tensor) const;
  // All of them, the first one first.
  std::vector<std::string> all(const at::Tensor& tensor) const;

 private:
  std::map<const at::TensorImpl*, std::vector<std::string>> names_;
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

  // The parts of destination() are filled, and the values are those saved. The state is
  // destination()'s, without pieces that the checkpoint does not have (where that was allowed).
  // Called on all ranks after all have verified what they read, unless the checkpoint has nothing
  // of this object.
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
