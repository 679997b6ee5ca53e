// Parts of error messages.
#pragma once

#include <chrono>
#include <exception>
#include <string>

#include "comm/transport.h"

namespace lockstep::comm {

// What libtorch's exception says, without its backtrace and source positions.
std::string first_line(const std::exception& error);

// "30 s", "1.5 s".
std::string text_of(std::chrono::milliseconds time);

// What all ranks must agree on: "all_reduce sum float32 x 1048576". With `sizes_too`, the sizes in
// lists, where they are the same on every rank.
std::string signature_of(const Request& request);

// "all_reduce #412 (bucket 3, float32 x 1048576)".
std::string text_of(const Request& request, uint64_t number);

}  // namespace lockstep::comm
