// Where memory allocators are found that programs are started with.
#pragma once

#include <filesystem>
#include <string>
#include <string_view>
#include <vector>

namespace lockstep::launch {

// As find_allocator() of launch/job/run.h, in these folders.
std::string find_allocator(std::string_view name,
                           const std::vector<std::filesystem::path>& folders);

}  // namespace lockstep::launch
