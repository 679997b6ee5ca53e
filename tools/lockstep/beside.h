// Programs that are installed beside this one.
#pragma once

#include <string>

namespace lockstep::tool {

// The path of a program of ours that links libtorch. Throws StartError (127), which begins with
// [tag], when it is not there or cannot be executed.
std::string program_beside(const std::string& name, const std::string& tag);

}  // namespace lockstep::tool
