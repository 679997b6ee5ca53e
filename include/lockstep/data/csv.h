// Tables in CSV files (RFC 4180): numbers to learn from, and numbers or classes to predict.
//
//   CsvDataset train("houses.csv", {.targets = {"price"}});
//   StandardScaler scaler;
//   scaler.fit(train, world, {.names = train.feature_names()});
//   Loader loader(train, world, {.batch_size = 64, .transforms = {scaler.transform()}});
#pragma once

#include <cstdint>
#include <filesystem>
#include <string>
#include <utility>
#include <vector>

#include "lockstep/data/tensor_dataset.h"

namespace lockstep::data {

// What happens to a row that cannot be used: with other fields than the others, a value that is not
// a number, is missing, infinite or beyond float32, or an unknown class.
enum class BadRows {
  Error,  // DataError with file, line and column
  Skip,   // left out and counted: CsvDataset::skipped()
};

// What becomes of a missing feature: an empty field, or one of CsvOptions::missing.
enum class MissingValues {
  Bad,  // the row is bad
  Nan,  // it is NaN
};

// How a file is read.
struct CsvOptions {
  // Columns by name, or by number from 0.
  std::vector<std::string> targets = {};   // empty: the last column
  std::vector<std::string> features = {};  // empty: all that are not targets
  char delimiter = ',';
  bool header = true;  // the first record has the columns' names
  // The one target column holds classes: numbers 0, 1, 2, ... as they are; any other texts are
  // numbered in their order (of bytes; of value when all are whole numbers).
  bool classification = false;
  // The texts of classes 0, 1, ..., each once, as class_names() of the training data gives them;
  // another text makes a bad row.
  std::vector<std::string> classes = {};
  // Texts of missing values, compared as they are: a number, such as "-999", is one, too.
  std::vector<std::string> missing = {"NA", "N/A", "NaN", "nan", "NULL", "null"};
  MissingValues missing_values = MissingValues::Bad;
  BadRows bad_rows = BadRows::Error;
};

// A file's rows in memory, as float32 (read as float64, rounded once). Batches: data n x features;
// target n x targets, or int64 n with classification. The same on all ranks that read the same
// file. Spaces around numbers are left out, and "true" and "false" are 1 and 0.
class CsvDataset : public TensorDataset {
 public:
  // Reads the whole file, some 200 MB a second. Throws DataError with file and line, or with the
  // nearest name for a column that is not there; ConfigError for options that contradict each
  // other.
  explicit CsvDataset(const std::filesystem::path& file, const CsvOptions& options = {});

  // The columns' names in the header, or their numbers.
  const std::vector<std::string>& feature_names() const { return feature_names_; }
  const std::vector<std::string>& target_names() const { return target_names_; }
  // With classification: how many there are; and their texts, where they are not numbers.
  int64_t class_count() const { return class_count_; }
  const std::vector<std::string>& class_names() const { return class_names_; }
  // Bad rows that were left out, and what was wrong with the first.
  int64_t skipped() const { return skipped_; }
  const std::string& first_skipped() const { return first_skipped_; }
  // Where a sample begins in the file, from 1.
  int64_t line_of(int64_t sample) const;

 private:
  struct Table;
  explicit CsvDataset(Table table);

  std::vector<std::string> feature_names_, target_names_, class_names_;
  int64_t class_count_ = 0;
  int64_t skipped_ = 0;
  std::string first_skipped_;
  std::vector<std::pair<int64_t, int64_t>>
      lines_;  // sample, line: where lines do not increase by one
};

}  // namespace lockstep::data

namespace lockstep {
using data::CsvDataset;
using data::CsvOptions;
}  // namespace lockstep
