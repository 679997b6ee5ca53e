#include "lockstep/data/standard_scaler.h"

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <torch/torch.h>

#include <algorithm>
#include <cmath>
#include <exception>
#include <functional>
#include <limits>
#include <numeric>

#include "comm/text.h"
#include "lockstep/core/error.h"
#include "lockstep/core/exact_sum.h"
#include "lockstep/core/shard.h"

namespace lockstep::data {
namespace {

constexpr const char* kScaler = "[standard scaler]";
constexpr int64_t kRowsAtOnce = 4096;
constexpr double kInfinity = std::numeric_limits<double>::infinity();

// Gives this rank's rows in parts, with the number of the first: float64, n x columns.
using Rows = std::function<void(const std::function<void(const at::Tensor&, int64_t first)>&)>;

at::Tensor as_rows(const at::Tensor& samples) {
  if (samples.is_complex()) throw ConfigError(fmt::format("{} data are complex", kScaler));
  const at::Tensor rows = samples.detach().to(at::kCPU, at::kDouble);
  return (rows.dim() < 2 ? rows.reshape({-1, 1}) : rows.flatten(1)).contiguous();
}

// Sums over ranks of the columns' ExactSums.
std::vector<double> totals(std::vector<ExactSum>& sums, const comm::Group& group) {
  std::vector<int64_t> digits;
  for (ExactSum& sum : sums) {
    digits.insert(digits.end(), sum.digits().begin(), sum.digits().end());
  }
  const at::Tensor all =
      at::from_blob(digits.data(), {static_cast<int64_t>(digits.size())}, at::kLong);
  group.all_reduce(all, ReduceOp::Sum, {.label = "scaler"}).wait();
  std::vector<double> values;
  for (size_t i = 0; i < sums.size(); ++i) {
    ExactSum::Digits of_column{};
    std::copy_n(digits.begin() + static_cast<int64_t>(i) * ExactSum::kDigits, ExactSum::kDigits,
                of_column.begin());
    values.push_back(ExactSum(of_column).value());
  }
  return values;
}

// What a rank has found, and what it says when it has found something wrong.
struct Columns {
  int64_t rows = 0;
  std::vector<ExactSum> sums;
  std::vector<double> least, most;
  std::string fault;
  std::exception_ptr thrown;  // by data that this rank cannot read, and the others may

  // What reading throws is kept for agreed_width(): the other ranks are to know of it.
  void read(const Rows& each, const std::function<void(const at::Tensor&, int64_t first)>& use) {
    try {
      each(use);
    } catch (...) {
      thrown = std::current_exception();
      fault = comm::thrown_text();
      if (fault.empty()) fault = "an exception without a text";
    }
  }

  void resize(size_t width) {
    sums.resize(width);
    least.assign(width, kInfinity);
    most.assign(width, -kInfinity);
  }

  bool has_other_width(const at::Tensor& part, int64_t first) {
    const auto width = static_cast<size_t>(part.size(1));
    if (width != sums.size() && fault.empty()) {
      fault = fmt::format("samples from {} on have {} columns, and those before have {}", first,
                          width, sums.size());
    }
    return width != sums.size();
  }

  void add(const at::Tensor& part, int64_t first, const ScalerOptions& options) {
    if (sums.empty()) resize(static_cast<size_t>(part.size(1)));
    if (has_other_width(part, first)) return;
    const auto* value = part.const_data_ptr<double>();
    for (int64_t row = 0; row < part.size(0); ++row) {
      for (size_t c = 0; c < sums.size(); ++c, ++value) {
        if (!std::isfinite(*value)) {
          if (fault.empty()) {
            fault = fmt::format(
                "{} of sample {} is {}; scale finite numbers only: leave such samples out, or "
                "put a number in place of it",
                column_text(c, options), first + row, *value);
          }
          continue;
        }
        sums[c].add(*value);
        least[c] = std::min(least[c], *value);
        most[c] = std::max(most[c], *value);
      }
    }
    rows += part.size(0);
  }

  static std::string column_text(size_t c, const ScalerOptions& options) {
    return c < options.names.size() ? fmt::format("column '{}' ({})", options.names[c], c)
                                    : fmt::format("column {}", c);
  }
};

// Throws the first rank's fault, or that ranks have other columns, on all ranks.
size_t agreed_width(Columns& columns, const comm::Group& group) {
  const std::string mine = fmt::format("{} {}", columns.sums.size(), columns.fault);
  size_t width = 0;
  const auto all = group.all_gather_bytes(mine, {.label = "scaler"});
  if (columns.thrown) std::rethrow_exception(columns.thrown);
  for (size_t rank = 0; rank < all.size(); ++rank) {
    const size_t space = all[rank].find(' ');
    if (space + 1 < all[rank].size()) {
      throw DataError(fmt::format("{} rank {}: {}", kScaler, rank, all[rank].substr(space + 1)));
    }
    const size_t count = std::stoul(all[rank].substr(0, space));
    if (count != 0 && width != 0 && count != width) {
      throw ConfigError(fmt::format("{} rank {} has {} columns, and others have {}", kScaler, rank,
                                    count, width));
    }
    width = std::max(width, count);
  }
  if (width == 0) throw DataError(fmt::format("{} no rank has a sample", kScaler));
  if (columns.sums.empty()) columns.resize(width);
  return width;
}

at::Tensor over_ranks(std::vector<double>& values, ReduceOp op, const comm::Group& group) {
  at::Tensor all = at::tensor(values, at::kDouble);
  group.all_reduce(all, op, {.label = "scaler"}).wait();
  return all;
}

}  // namespace

struct StandardScaler::State {
  at::Tensor mean, deviation;

  void fit(const Rows& each, const comm::Group& group, const ScalerOptions& options) {
    group.refuse_python_ranks("StandardScaler");
    Columns columns;
    columns.read(each,
                 [&](const at::Tensor& part, int64_t first) { columns.add(part, first, options); });
    const size_t width = agreed_width(columns, group);
    at::Tensor rows = at::scalar_tensor(columns.rows, at::kLong);
    group.all_reduce(rows, ReduceOp::Sum, {.label = "scaler"}).wait();
    const auto count = rows.item<double>();
    std::vector<double> means = totals(columns.sums, group);
    for (double& value : means) value /= count;
    const at::Tensor least = over_ranks(columns.least, ReduceOp::Min, group);
    const at::Tensor most = over_ranks(columns.most, ReduceOp::Max, group);

    // Differences and squares round by themselves, their sum does not: no order matters.
    std::vector<ExactSum> squares(width);
    std::vector<double> beyond(width, 0);
    columns.read(each, [&](const at::Tensor& part, int64_t first) {
      if (columns.has_other_width(part, first)) return;
      const auto* value = part.const_data_ptr<double>();
      for (int64_t row = 0; row < part.size(0); ++row) {
        for (size_t c = 0; c < width; ++c, ++value) {
          const double difference = *value - means[c], square = difference * difference;
          if (std::isfinite(square)) {
            squares[c].add(square);
          } else {
            beyond[c] = 1;
          }
        }
      }
    });
    agreed_width(columns, group);  // what cannot be read a second time
    const at::Tensor any_beyond = over_ranks(beyond, ReduceOp::Max, group);
    std::vector<double> deviations = totals(squares, group);
    for (size_t c = 0; c < width; ++c) {
      const auto i = static_cast<int64_t>(c);
      const auto name = [&] { return Columns::column_text(c, options); };
      deviations[c] = std::sqrt(deviations[c] / count);
      if (any_beyond[i].item<double>() != 0 || !std::isfinite(means[c])) {
        throw DataError(
            fmt::format("{} {}: values from {} to {} have no standard deviation in "
                        "float64",
                        kScaler, name(), least[i].item<double>(), most[i].item<double>()));
      }
      if (least[i].item<double>() != most[i].item<double>() && deviations[c] > 0) continue;
      if (options.constant == ConstantColumn::Error) {
        throw DataError(fmt::format(
            "{} {} is constant: all {} values are {}, so that it has no deviation to divide by; "
            "leave the column out, or let it become 0 with .constant = ConstantColumn::Zero",
            kScaler, name(), static_cast<int64_t>(count), least[i].item<double>()));
      }
      means[c] = least[i].item<double>();
      deviations[c] = 1;
    }
    mean = at::tensor(means, at::kDouble);
    deviation = at::tensor(deviations, at::kDouble);
  }

  at::Tensor change(const at::Tensor& samples, const auto& formula) const {
    if (!mean.defined()) {
      throw ConfigError(fmt::format(
          "{} it knows no mean yet: call fit() or restore a checkpoint first", kScaler));
    }
    const at::Tensor rows = samples.detach().to(at::kDouble);
    const at::Tensor flat = rows.dim() < 2 ? rows.reshape({-1, 1}) : rows.flatten(1);
    if (flat.size(1) != mean.size(0)) {
      throw ConfigError(fmt::format("{} samples [{}] have {} columns; it was fitted to {}", kScaler,
                                    fmt::join(samples.sizes(), ", "), flat.size(1), mean.size(0)));
    }
    return formula(flat, mean.to(samples.device()), deviation.to(samples.device()))
        .view(samples.sizes())
        .to(samples.is_floating_point() ? samples.scalar_type() : at::kFloat);
  }
};

namespace {

// This rank's share of a data set.
Rows rows_of(const Dataset& dataset, const comm::Group& group, at::Tensor Batch::*what) {
  const Range own = Shard{group.rank(), group.size()}.of(dataset.size());
  return [&dataset, own, what](const auto& use) {
    for (int64_t begin = own.begin; begin < own.end; begin += kRowsAtOnce) {
      std::vector<int64_t> indices(static_cast<size_t>(std::min(kRowsAtOnce, own.end - begin)));
      std::iota(indices.begin(), indices.end(), begin);
      const Batch batch = dataset.get_batch(indices);
      if (!(batch.*what).defined()) throw ConfigError(fmt::format("{} no targets", kScaler));
      use(as_rows(batch.*what), begin);
    }
  };
}

}  // namespace

StandardScaler::StandardScaler() : state_(std::make_shared<State>()) {}

void StandardScaler::fit(const Dataset& dataset, const comm::Group& group,
                         const ScalerOptions& options) {
  state_->fit(rows_of(dataset, group, &Batch::data), group, options);
}

void StandardScaler::fit_targets(const Dataset& dataset, const comm::Group& group,
                                 const ScalerOptions& options) {
  state_->fit(rows_of(dataset, group, &Batch::target), group, options);
}

void StandardScaler::fit_rows(const at::Tensor& rows, const comm::Group& group,
                              const ScalerOptions& options) {
  at::Tensor all;
  state_->fit(
      [&](const auto& use) {
        if (!all.defined()) all = as_rows(rows);
        if (all.size(0) > 0) use(all, 0);
      },
      group, options);
}

at::Tensor StandardScaler::apply(const at::Tensor& samples) const {
  return state_->change(
      samples, [](const at::Tensor& x, const at::Tensor& mean, const at::Tensor& deviation) {
        return (x - mean) / deviation;
      });
}

at::Tensor StandardScaler::invert(const at::Tensor& scaled) const {
  return state_->change(scaled, [](const at::Tensor& x, const at::Tensor& mean,
                                   const at::Tensor& deviation) { return x * deviation + mean; });
}

Transform StandardScaler::transform() const {
  return [self = *this](Batch batch) { return Batch{self.apply(batch.data), batch.target}; };
}

Transform StandardScaler::transform_targets() const {
  return [self = *this](Batch batch) { return Batch{batch.data, self.apply(batch.target)}; };
}

bool StandardScaler::is_fitted() const { return state_->mean.defined(); }
const at::Tensor& StandardScaler::mean() const { return state_->mean; }
const at::Tensor& StandardScaler::deviation() const { return state_->deviation; }

void StandardScaler::restore(const at::Tensor& mean, const at::Tensor& deviation) {
  if (!mean.defined() || !deviation.defined()) {
    throw ConfigError(fmt::format("{} restore: mean or deviation is undefined", kScaler));
  }
  if (mean.dim() != 1 || mean.sizes() != deviation.sizes()) {
    throw ConfigError(fmt::format("{} mean [{}] and deviation [{}] need one number per column",
                                  kScaler, fmt::join(mean.sizes(), ", "),
                                  fmt::join(deviation.sizes(), ", ")));
  }
  state_->mean = mean.detach().to(at::kCPU, at::kDouble).clone();
  state_->deviation = deviation.detach().to(at::kCPU, at::kDouble).clone();
}

}  // namespace lockstep::data
