// Parts of error messages.
#pragma once

#include <chrono>
#include <exception>
#include <string>
#include <string_view>

#include "comm/transport.h"

namespace lockstep::comm {

// What libtorch's exception says, without its backtrace and source positions.
std::string first_line(const std::exception& error);

// What the exception that is being handled says, without libtorch's backtrace.
std::string thrown_text();
// thrown_text() for other ranks, which throw it again by throw_told(): begins with a letter.
std::string told_text();
// Throws what another rank has told, `before` it: a ConfigError as such, all else as an Error.
[[noreturn]] void throw_told(std::string_view told, std::string_view before = "");

// The text; of one of more than 200 bytes the beginning, and how long it is.
std::string beginning_of(std::string_view text);

// "30 s", "1.5 s".
std::string text_of(std::chrono::milliseconds time);

// The counts in lists that are the same on every rank: "[1,3]", or "5 in parts of [2,3]" where the
// tensors go as one; nothing for other calls. Of a long list the beginning, and a hash of all.
std::string list_of(const Request& request);

// What all ranks must agree on: "all_reduce sum float32 x 1048576".
std::string signature_of(const Request& request);

// "all_reduce #412 (bucket 3, float32 x 1048576)".
std::string text_of(const Request& request, uint64_t number);

}  // namespace lockstep::comm
