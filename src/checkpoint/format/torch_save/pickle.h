// The pickles of torch.save, read without executing anything: what Python would call is known here
// by its name, or refused.
#pragma once

#include <cstdint>
#include <deque>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "lockstep/checkpoint/box.h"

namespace lockstep::checkpoint {

// A tensor as a pickle describes it: elements of a storage. Nothing has been compared with the
// storage yet.
struct PickledTensor {
  std::string storage;  // its key: data/KEY in the archive
  std::string dtype;    // as safetensors has it, or C128
  int64_t storage_elements = 0;
  Sizes sizes, strides;
  int64_t offset = 0;  // in elements
};

struct PickledValue {
  enum Kind {
    None,
    Bool,
    Int,
    Float,
    Text,
    List,     // and tuples: `items`
    Dict,     // `items` are keys and values by turns, in their order
    Tensor,   // and parameters
    Storage,  // what a tensor is made of
    Name,     // of a class, function or dtype, in `text`: "torch.float32"
  };
  Kind kind = None;
  int64_t integer = 0;
  double real = 0;
  std::string text;
  std::vector<const PickledValue*> items;
  std::optional<PickledTensor> tensor;
  bool is_object = false;  // a Dict that stands for a TorchScript module: its attributes come later
};

// What a pickle builds. Values may be used more than once, and contain themselves.
class Pickle {
 public:
  // Throws CheckpointError that begins with `where` and names what is not read: an opcode, a class
  // or function ("posix.system"), what is put together wrongly, what is cut short.
  Pickle(std::string_view bytes, std::string_view where);

  const PickledValue& root() const { return *root_; }

 private:
  friend class PickleReader;
  std::deque<PickledValue> values_;  // owns them all
  const PickledValue* root_ = nullptr;
};

}  // namespace lockstep::checkpoint
