// Any bytes as a CSV file, read in several ways: a table or an error of the library, and nothing
// else happens. The first byte chooses the options.
#include <cmath>
#include <cstdlib>
#include <string_view>

#include "data/csv/csv_table.h"
#include "lockstep/core/error.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* bytes, size_t count) {
  if (count == 0) return 0;
  const int choice = bytes[0];
  lockstep::data::CsvFormat format{.targets = {},
                                   .features = {},
                                   .delimiter = (choice & 1) != 0 ? ';' : ',',
                                   .header = (choice & 2) != 0,
                                   .classification = (choice & 4) != 0,
                                   .classes = {},
                                   .missing = {"NA"},
                                   .missing_is_nan = (choice & 8) != 0,
                                   .skip_bad = (choice & 16) != 0};
  if ((choice & 32) != 0) format.targets = {"a"};
  if ((choice & 64) != 0 && format.classification) format.classes = {"0", "b"};
  try {
    const std::string_view text(reinterpret_cast<const char*>(bytes) + 1, count - 1);
    const auto table = lockstep::data::parse_csv(text, "fuzz", format);
    const auto width = static_cast<int64_t>(table.feature_names.size());
    for (int64_t i = 0; i < table.rows * width; ++i) {
      const float value = table.features[static_cast<size_t>(i)];
      if (!std::isfinite(value) && !format.missing_is_nan) std::abort();
    }
    for (int64_t i = 0; format.classification && i < table.rows; ++i) {
      const int64_t number = table.classes[static_cast<size_t>(i)];
      if (number < 0 || (number >= table.class_count && table.class_names.size() > 0)) std::abort();
    }
    if (table.rows == 0 || table.lines.empty()) std::abort();
  } catch (const lockstep::Error&) {
  }
  return 0;
}
