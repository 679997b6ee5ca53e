// Which part of the state a rank writes.
#pragma once

#include <string>
#include <utility>
#include <vector>

#include "lockstep/checkpoint/safetensors.h"
#include "lockstep/checkpoint/state.h"

namespace lockstep::checkpoint {

// What is tracked, by name.
using Tracked = std::vector<std::pair<std::string, std::shared_ptr<Stateful>>>;

Names names_of(const Tracked& tracked);

// Which tensors this rank has of its own (CheckpointerOptions::each_rank).
struct EachRank {
  std::vector<std::string> patterns;
  int rank = 0;

  // By its name, or by that of the object which has it.
  bool has(const std::string& name) const;
  // The patterns that no tensor has.
  std::vector<std::string> unused(const State& state) const;
  // The name of a rank's.
  static std::string name_of(const std::string& name, int64_t rank);
};

// A name and patterns as the shell's. A pattern that is the name itself matches, whatever is in it.
bool matches(const std::string& name, const std::vector<std::string>& patterns);

// As matches(), and by the name of the object which has it: "net" for "net/fc.weight".
bool matches_with_object(const std::string& name, const std::vector<std::string>& patterns);

// What is wrong with the parts of a piece, for errors; empty when nothing is.
std::string fault_of_parts(const Piece& piece);

// Everything that a rank has, under the names of the checkpoint. Throws ConfigError for a name that
// comes twice, parts that do not have their box's sizes, and parts of what every rank has all of.
State described(const Tracked& tracked, const EachRank& each_rank);

// Texts that are the same on all ranks that save the same: of what all ranks have, a line each, of
// a tensor with the bits of some elements.
std::vector<std::string> common_lines(const State& state);

// A box that this rank writes: entry i of the file.
struct OwnBox {
  std::string tensor;
  std::string dtype;
  Sizes sizes;  // of the tensor
  Box box;
};

struct Share {
  std::vector<OwnBox> boxes;
  std::vector<TensorToWrite> entries;
  std::vector<at::Tensor> kept;  // what the entries refer to, which may be a device's memory
};

// Of the tensors that all ranks have about 1/world by bytes: those below 256 KiB are not cut. Of
// the others the rank's parts.
Share share_of(const State& state, const Shard& rank);

// From then on the entries' bytes are the host's.
void bring_to_host(Share& share);
// The same, and they are copies, one after another in `memory`, which grows as it has to.
void copy_into(Share& share, at::Tensor& memory);

// Part of a tensor.
at::Tensor narrowed(at::Tensor tensor, const Box& box);

}  // namespace lockstep::checkpoint
