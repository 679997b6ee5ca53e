// How many descriptors this process may have open.
#pragma once

#include <cstdint>

namespace lockstep {

// Raises the soft limit to the hard one, as children inherit it.
void raise_descriptor_limit() noexcept;
// To what it was before, for a child between fork() and execve(): a program with many descriptors
// may not be prepared for it (select()).
void restore_descriptor_limit() noexcept;

struct Descriptors {
  int64_t used = 0;
  int64_t limit = 0;
};
Descriptors descriptors();

}  // namespace lockstep
