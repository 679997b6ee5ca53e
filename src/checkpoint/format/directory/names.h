// The names of files and folders in a directory of checkpoints.
#pragma once

#include <string>
#include <string_view>

namespace lockstep::checkpoint {

inline constexpr std::string_view kManifestName = "manifest.json";
inline constexpr std::string_view kLatestName = "latest";
inline constexpr std::string_view kLockName = ".lock";
inline constexpr std::string_view kTemporary = ".tmp-";  // not whole: of saves and of exports
inline constexpr std::string_view kStep = "step-";

// Whether a save makes such a name for what is not whole, so that the next one may remove it:
// .tmp-latest, or .tmp-step-00001200.1-9c41b7e20d5fa863, with or without .1 and the random number.
bool is_leftover(std::string_view name);

// The file that an export would have renamed .tmp-9c41b7e20d5fa863-NAME to; empty for other names.
std::string_view exported_name(std::string_view name);

// 16 hexadecimal digits, so that no two attempts, on any host and in any job, have a name in
// common.
std::string random_digits();

}  // namespace lockstep::checkpoint
