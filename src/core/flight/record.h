// What a rank of the library records of its calls (lockstep/core/flight.h has what programs call).
#pragma once

#include <array>
#include <cstdint>
#include <string>

#include "lockstep/core/flight.h"

namespace lockstep::flight {

// The environment variable in which a rank finds the number of the inherited descriptor.
constexpr const char* kVariable = "LOCKSTEP_FLIGHT_FD";
// How many of its last calls each rank keeps.
constexpr uint32_t kOperations = 32;

uint64_t now_ns() noexcept;  // CLOCK_MONOTONIC

// A call of a collective, as it was announced. Texts are cut to fit.
struct Operation {
  uint64_t start_ns = 0, end_ns = 0;  // now_ns(); end 0 until it was waited for
  int64_t count = -1;                 // elements; -1 where that says nothing
  int32_t peer = -1;                  // root, receiver or sender; -1 for none
  uint32_t number = 0;                // of the call in its group, as errors quote it; 0: none yet
  std::array<char, 24> what{};        // "all_reduce sum"
  std::array<char, 12> dtype{};
  std::array<char, 40> label{};

  // "all_reduce sum #412 (bucket 3, float32 x 1048576)"
  std::string text() const;
};

// Announces a call, which begins at its start_ns; returns its number, from 1; 0 when nothing is
// recorded.
uint32_t begin(const Operation& operation) noexcept;
// The transport has given that call its number in the group.
void number(uint32_t call, uint64_t in_group) noexcept;
// The call is over, since `at_ns`.
void end(uint32_t call, uint64_t at_ns = now_ns()) noexcept;

// The signal by which the launcher asks the main thread of a rank for its stack; harmless where it
// is caught, deadly elsewhere.
int question() noexcept;

}  // namespace lockstep::flight
