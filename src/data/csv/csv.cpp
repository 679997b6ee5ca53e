#include "lockstep/data/csv.h"

#include <fmt/format.h>
#include <torch/torch.h>

#include <algorithm>

#include "data/csv/csv_table.h"
#include "data/mapped_bytes.h"
#include "lockstep/core/error.h"

namespace lockstep::data {
namespace {

// Memory that belongs to the tensor from now on.
template <class T>
at::Tensor owning(Array<T> memory, at::IntArrayRef sizes, at::ScalarType dtype) {
  T* address = memory.release();
  return at::from_blob(
      address, sizes, [](void* gone) { std::free(gone); }, dtype);
}

}  // namespace

struct CsvDataset::Table {
  CsvTable table;
  at::Tensor features;
  at::Tensor targets;

  static Table read(const std::filesystem::path& file, const CsvOptions& options) {
    const MappedBytes bytes(file, "[csv]");
    Table read{.table = parse_csv(bytes.view(), file.string(),
                                  {.targets = options.targets,
                                   .features = options.features,
                                   .delimiter = options.delimiter,
                                   .header = options.header,
                                   .classification = options.classification,
                                   .classes = options.classes,
                                   .missing = options.missing,
                                   .missing_is_nan = options.missing_values == MissingValues::Nan,
                                   .skip_bad = options.bad_rows == BadRows::Skip}),
               .features = {},
               .targets = {}};
    CsvTable& table = read.table;
    read.features = owning(std::move(table.features), {table.rows, std::ssize(table.feature_names)},
                           at::kFloat);
    read.targets = options.classification
                       ? owning(std::move(table.classes), {table.rows}, at::kLong)
                       : owning(std::move(table.targets),
                                {table.rows, std::ssize(table.target_names)}, at::kFloat);
    return read;
  }
};

CsvDataset::CsvDataset(const std::filesystem::path& file, const CsvOptions& options)
    : CsvDataset(Table::read(file, options)) {}

CsvDataset::CsvDataset(Table read)
    : TensorDataset(std::move(read.features), std::move(read.targets)),
      feature_names_(std::move(read.table.feature_names)),
      target_names_(std::move(read.table.target_names)),
      class_names_(std::move(read.table.class_names)),
      class_count_(read.table.class_count),
      skipped_(read.table.skipped),
      first_skipped_(std::move(read.table.first_skipped)),
      lines_(std::move(read.table.lines)) {}

int64_t CsvDataset::line_of(int64_t sample) const {
  if (sample < 0 || sample >= size()) {
    throw DataError(fmt::format("[csv] sample {} does not exist: there are {}", sample, size()));
  }
  const auto after =
      std::upper_bound(lines_.begin(), lines_.end(), sample,
                       [](int64_t value, const auto& known) { return value < known.first; });
  const auto& known = *(after - 1);
  return known.second + sample - known.first;
}

}  // namespace lockstep::data
