// The limits of the control groups of this process.
#pragma once

#include <cstdint>
#include <filesystem>
#include <optional>

namespace lockstep {

// Of version 1 and 2, and of all groups that this process is in, one inside the other. Nothing
// where none sets a limit. `root`: the directory of proc and sys.
//
// Bytes that may still be taken. Pages of files that the kernel would give up for them count as
// free.
std::optional<int64_t> group_memory_left(const std::filesystem::path& root = "/");
// How many cores' time may be used.
std::optional<double> group_cores(const std::filesystem::path& root = "/");
// group_cores() as whole cores, rounded up.
std::optional<int> whole_group_cores(const std::filesystem::path& root = "/");

}  // namespace lockstep
