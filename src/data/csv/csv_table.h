// A CSV file as arrays. Free of torch, for the fuzzer's sake.
#pragma once

#include <cstdint>
#include <cstdlib>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace lockstep::data {

// As CsvOptions, whose header needs torch.
struct CsvFormat {
  std::vector<std::string> targets, features;
  char delimiter;
  bool header;
  bool classification;
  std::vector<std::string> classes;
  std::vector<std::string> missing;
  bool missing_is_nan;
  bool skip_bad;
};

// Arrays are malloc()ed for all records that the file can hold, and touched as far as rows go.
template <class T>
struct FreeMemory {
  void operator()(T* memory) const { std::free(memory); }
};
template <class T>
using Array = std::unique_ptr<T[], FreeMemory<T>>;

struct CsvTable {
  std::vector<std::string> feature_names, target_names;
  int64_t rows = 0;
  Array<float> features;  // rows x features
  Array<float> targets;   // rows x targets, or
  Array<int64_t> classes;
  std::vector<std::string> class_names;
  int64_t class_count = 0;
  int64_t skipped = 0;
  std::string first_skipped;
  std::vector<std::pair<int64_t, int64_t>> lines;
};

// `name` stands for the file in errors. Throws DataError and ConfigError as CsvDataset does.
CsvTable parse_csv(std::string_view bytes, const std::string& name, const CsvFormat& format);

}  // namespace lockstep::data
