// The metrics (lockstep/train/metric.h). Definitions and names are those of scikit-learn.
//
// Outputs of classifiers are n x classes, or n x classes x ... as torch's cross_entropy() has them,
// or n x ... x classes, with targets int64 of n x ...: every element is a sample. Outputs n or n x
// 1 are those of a classifier of two classes, whose class is 1 above `threshold`.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>

#include "lockstep/train/metric.h"

namespace lockstep::train {

// The mean of numbers: losses, lengths.
class Mean : public Metric {
 public:
  // The name of its value in values().
  explicit Mean(std::string name = "mean") : name_(std::move(name)) {}
  std::string name() const override { return name_; }
  std::string kind() const override { return "mean"; }
  // Numbers of any shape, all real dtypes; no targets (undefined). Weights of the same shape: a
  // batch's mean loss with its number of samples, at::scalar_tensor(64).
  void update(const at::Tensor& numbers, const at::Tensor& targets = {},
              const at::Tensor& weights = {}) override;
  // One number, that counts `weight` times.
  void update(double number, double weight = 1);

 protected:
  std::map<std::string, double> values_of(const MetricState& total) const override;

 private:
  std::string name_;
};

// Options of Accuracy.
struct AccuracyOptions {
  // Right when the target is among the `top_k` largest outputs; of equal outputs the lower class is
  // the larger one. Named "accuracy", or "top_5_accuracy".
  int64_t top_k = 1;
  std::optional<int64_t> ignore_index = -100;  // targets that do not count
  double threshold = 0;  // of two classes: 0 for logits, 0.5 for probabilities
};

// The share of samples whose class is right.
class Accuracy : public Metric {
 public:
  // Throws ConfigError for a top_k below 1.
  explicit Accuracy(const AccuracyOptions& options = {});
  std::string name() const override;
  std::string kind() const override;
  void update(const at::Tensor& outputs, const at::Tensor& targets,
              const at::Tensor& weights = {}) override;

 protected:
  std::map<std::string, double> values_of(const MetricState& total) const override;

 private:
  AccuracyOptions options_;
};

// Options of ConfusionMatrix.
struct ConfusionMatrixOptions {
  int64_t classes = 0;  // 0: as many as outputs have
  std::optional<int64_t> ignore_index = -100;
  double threshold = 0;
};

// Which class was taken for which, and what follows from it. values(): "accuracy", and the means
// over classes of "precision", "recall" and "f1" (macro averages; 0 where a class was never
// predicted or never there). compute() gives f1.
class ConfusionMatrix : public Metric {
 public:
  // Throws ConfigError for less than no classes.
  explicit ConfusionMatrix(const ConfusionMatrixOptions& options = {});
  std::string name() const override { return "f1"; }
  std::string kind() const override;
  // Weights have to be whole numbers: ConfigError otherwise.
  void update(const at::Tensor& outputs, const at::Tensor& targets,
              const at::Tensor& weights = {}) override;

  // Row i, column j: samples of class i that were taken for class j; int64, classes x classes.
  // Every rank calls it, as compute().
  at::Tensor matrix(const Group& group = {}) const;

  // By class, float64.
  struct Scores {
    at::Tensor precision;
    at::Tensor recall;
    at::Tensor f1;
    at::Tensor support;  // samples of the class
  };
  // Every rank calls it, as compute().
  Scores by_class(const Group& group = {}) const;

 protected:
  std::map<std::string, double> values_of(const MetricState& total) const override;

 private:
  ConfusionMatrixOptions options_;
};

// The area under the ROC curve: how probably a sample of class 1 has a larger output than one of
// class 0, equal ones counting half. Exact, from all samples: ranks keep theirs (24 bytes each),
// and compute() has those of all ranks on each. Outputs n, n x 1, or n x 2 (the second less the
// first); targets 0 or 1 of any dtype. DataError on all ranks when one class is missing.
class Auc : public Metric {
 public:
  std::string name() const override { return "auc"; }
  void update(const at::Tensor& outputs, const at::Tensor& targets,
              const at::Tensor& weights = {}) override;

 protected:
  std::map<std::string, double> values_of(const MetricState& total) const override;
};

// Options of Perplexity.
struct PerplexityOptions {
  std::optional<int64_t> ignore_index = -100;
};

// exp of the mean cross-entropy of the targets (tokens), from logits. values(): also
// "cross_entropy".
class Perplexity : public Metric {
 public:
  // Nothing is counted yet.
  explicit Perplexity(const PerplexityOptions& options = {}) : options_(options) {}
  std::string name() const override { return "perplexity"; }
  std::string kind() const override;
  void update(const at::Tensor& outputs, const at::Tensor& targets,
              const at::Tensor& weights = {}) override;
  // A mean cross-entropy over this many targets that was computed without all logits
  // (lockstep/models/cross_entropy.h). With 0 targets nothing is counted, and the mean is ignored;
  // throws ConfigError for fewer.
  void update(double cross_entropy, int64_t targets);

 protected:
  std::map<std::string, double> values_of(const MetricState& total) const override;

 private:
  PerplexityOptions options_;
};

// What compute() of a Regression gives.
enum class RegressionScore { Mse, Rmse, Mae, R2 };

// Scores of predicted numbers. values(): "mse", "rmse", "mae" and "r2", means over columns. R2 is
// that of scikit-learn: 1 less the ratio of the squared errors to the squared deviations from the
// mean; for targets that are all equal 1 when all outputs are right and 0 otherwise; NaN for one
// sample.
class Regression : public Metric {
 public:
  // Which of its scores compute() gives.
  explicit Regression(RegressionScore score = RegressionScore::Mse) : score_(score) {}
  std::string name() const override;
  std::string kind() const override { return "regression"; }
  // Outputs and targets of one shape, n or n x columns; outputs n x 1 also with targets n, and the
  // other way round.
  void update(const at::Tensor& outputs, const at::Tensor& targets,
              const at::Tensor& weights = {}) override;

 protected:
  std::map<std::string, double> values_of(const MetricState& total) const override;

 private:
  RegressionScore score_;
};

// What make_metric() passes on.
struct MetricOptions {
  int64_t top_k = 5;
  int64_t classes = 0;
  std::optional<int64_t> ignore_index = -100;
  double threshold = 0;
};

// The metric of this name: accuracy, top_k, confusion_matrix, auc, perplexity, mse, rmse, mae, r2,
// mean. Throws ConfigError that lists the names.
std::unique_ptr<Metric> make_metric(std::string_view name, const MetricOptions& options = {});

}  // namespace lockstep::train

namespace lockstep {
using train::Accuracy;
using train::Auc;
using train::ConfusionMatrix;
using train::Mean;
using train::Perplexity;
using train::Regression;
}  // namespace lockstep
