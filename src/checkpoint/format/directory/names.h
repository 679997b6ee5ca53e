// The names of files and folders in a directory of checkpoints.
#pragma once

#include <string_view>

namespace lockstep::checkpoint {

inline constexpr std::string_view kManifestName = "manifest.json";
inline constexpr std::string_view kLatestName = "latest";
inline constexpr std::string_view kLockName = ".lock";
inline constexpr std::string_view kTemporary =
    ".tmp-";  // everything else may be removed by the next save
inline constexpr std::string_view kStep = "step-";

}  // namespace lockstep::checkpoint
