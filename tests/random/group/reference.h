// What every rank's memory holds after each call, by scalar loops over all ranks' memory in one
// process. Nothing of src/comm: the order of summation is written down here a second time.
#pragma once

#include <string>
#include <vector>

#include "random/group/plan.h"

namespace lockstep::random_group {

// The bytes of element `index` when memory is filled from `seed`; `small`: whole numbers from 0
// to 2.
struct Filling {
  uint64_t seed = 0;
  bool small = false;
};
void fill(char* at, c10::ScalarType dtype, const Filling& filling, int64_t count);

class Reference {
 public:
  Reference(const Program& program, const Plan& plan);

  // As every rank's call of ops[op] leaves the memory. New values come first, where the operation
  // asks for them.
  void run(int op);

  const std::vector<char>& memory(int arena, int rank) const { return memory_[arena][rank]; }

  // Where `got`, a copy of the rank's arena, is something else at the places of `view`.
  std::string difference(int arena, int rank, const char* got,
                         const std::vector<int64_t>& places) const;

 private:
  using Bytes = std::vector<char>;
  Bytes take(int rank, const View& view) const;
  void put(int rank, const View& view, const char* from);
  Bytes combined(const Op& op, c10::ScalarType dtype, const std::vector<Bytes>& parts,
                 const std::vector<int>& members) const;
  void run_group(int op, const std::vector<int>& members);

  const Program& program_;
  const Plan& plan_;
  std::vector<std::vector<Bytes>> memory_;  // by arena and rank
};

// How ranks fill their buffers before an operation.
Filling filling_of(const Program& program, int op, int buffer, int rank);
// The buffers in which the call's tensors lie, each once.
std::vector<int> buffers_of(const Plan& plan, int op, int rank);

}  // namespace lockstep::random_group
