// What has to stay the same for a run to repeat to the bit, and a report of it.
#pragma once

#include <string>
#include <utility>
#include <vector>

#include "lockstep/comm/group.h"

namespace lockstep::parallel {

// What libtorch does when an operation has no deterministic kernel.
enum class Deterministic { Off, Warn, Error };

// For all threads of the process, as Python's torch.use_deterministic_algorithms; turns cuDNN's
// choice of kernels by timing off, too. CUDA's products need CUBLAS_WORKSPACE_CONFIG=:4096:8 in the
// environment besides.
void use_deterministic_algorithms(Deterministic mode);

// Pairs of a name and a value, in a fixed order: "libtorch", "processor", "instruction set",
// "threads", "oneDNN", "MKL", "float32 products", "deterministic algorithms", "sums over ranks".
// Where it is not the standard's, also "arithmetic": whether the calling thread rounds to nearest
// and flushes denormals. Two runs whose reports and inputs are equal compute the same bits on CPUs;
// write it beside results and into checkpoints.
struct DeterminismReport {
  std::vector<std::pair<std::string, std::string>> items;

  // One line for a program's header: "libtorch 2.15.0, processor AMD EPYC, instruction set AVX512,
  // threads 1, ...".
  std::string text() const;
  // What differs from another report, such as "threads: 1 here, 2 there"; empty when nothing does.
  std::vector<std::string> differences(const DeterminismReport& other) const;
};

// The report of this process as it is now. Does not communicate.
DeterminismReport determinism_report(const Group& group);

}  // namespace lockstep::parallel

namespace lockstep {
using parallel::determinism_report;
using parallel::DeterminismReport;
using parallel::Deterministic;
using parallel::use_deterministic_algorithms;
}  // namespace lockstep
