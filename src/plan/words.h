// Figures as people read them, and tables.
#pragma once

#include <string>
#include <vector>

namespace lockstep::plan {

std::string bytes_text(double bytes);      // "7.49 GiB"
std::string seconds_text(double seconds);  // "12.3 ms"
std::string count_text(double count);      // "4.02 G", "12.3 k"
std::string percent_text(double share);    // "12 %"

// Columns as wide as they have to be, the first one to the left, the others to the right. Of a
// table wider than `width` (0: any) the last columns are left out.
std::string table_text(const std::vector<std::vector<std::string>>& rows, int width);
// Sentences broken into lines, of 100 columns when `width` is 0.
std::string wrapped(const std::string& text, int width);

}  // namespace lockstep::plan
