// Whole files.
#pragma once

#include <string>
#include <string_view>

namespace lockstep::text {

// Throws DataError that names the file and what the system says.
std::string read_file(const std::string& path);

// Under another name first: the file is whole, or as it was, and the disk has it. Throws DataError.
void write_file(const std::string& path, std::string_view bytes);

}  // namespace lockstep::text
