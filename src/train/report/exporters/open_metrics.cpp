#include "lockstep/train/open_metrics.h"

#include <fmt/format.h>

#include <cmath>

#include "core/files/whole_file.h"
#include "lockstep/text/utf8.h"

namespace lockstep::train {
namespace {

std::string metric_value(double value) {
  if (std::isnan(value)) return "NaN";
  if (std::isinf(value)) return value > 0 ? "+Inf" : "-Inf";
  return fmt::format("{}", value);
}

// Within the quotes of a label.
std::string label(std::string_view value) {
  std::string safe;
  for (const char letter : text::valid_utf8(value)) {
    if (letter == '\\' || letter == '"') safe += '\\';
    safe += letter == '\n' ? std::string("\\n") : std::string(1, letter);
  }
  return safe;
}

}  // namespace

std::string open_metrics(const StepReport& report, std::string_view run) {
  const std::string name = label(run);
  std::string text;
  const auto family = [&](const char* metric, const char* type, const char* help) {
    text += fmt::format("# TYPE {} {}\n# HELP {} {}\n", metric, type, metric, help);
  };
  const auto gauge = [&](const char* metric, const char* help, double value) {
    family(metric, "gauge", help);
    text += fmt::format("{}{{run=\"{}\"}} {}\n", metric, name, metric_value(value));
  };
  gauge("lockstep_step", "Steps made so far.", static_cast<double>(report.step));
  gauge("lockstep_epoch", "The epoch, from 0.", static_cast<double>(report.epoch));
  if (const auto& loss = report.shown_loss()) {
    gauge("lockstep_loss", "Mean loss of the steps since the report before, over all ranks.",
          *loss);
  }
  if (report.learning_rate)
    gauge("lockstep_learning_rate", "Learning rate.", *report.learning_rate);
  if (report.gradient_norm) {
    gauge("lockstep_gradient_norm", "Norm of the gradients before it was clipped.",
          *report.gradient_norm);
  }
  gauge("lockstep_samples_per_second", "Samples per second on all ranks.",
        report.samples_per_second);
  // A gauge, so that the text is right in the older format of the textfile collector, too, which
  // has other names for counters.
  gauge("lockstep_samples", "Samples taken so far on all ranks.",
        static_cast<double>(report.samples));
  if (!report.ranks.empty()) {
    bool has_gpus = false;
    family("lockstep_step_seconds", "gauge", "Mean time of a step, by what it was spent on.");
    for (size_t rank = 0; rank < report.ranks.size(); ++rank) {
      const RankFigures& figures = report.ranks[rank];
      const auto kind = [&](const char* what, double seconds) {
        text += fmt::format("lockstep_step_seconds{{run=\"{}\",rank=\"{}\",kind=\"{}\"}} {}\n",
                            name, rank, what, metric_value(seconds));
      };
      kind("compute", figures.compute_seconds());
      kind("communication", figures.communication_seconds);
      kind("data", figures.data_seconds);
      kind("checkpoint", figures.checkpoint_seconds);
    }
    family("lockstep_memory_bytes", "gauge", "Resident memory of the rank's process.");
    for (size_t rank = 0; rank < report.ranks.size(); ++rank) {
      text += fmt::format("lockstep_memory_bytes{{run=\"{}\",rank=\"{}\"}} {}\n", name, rank,
                          report.ranks[rank].memory_bytes);
    }
    for (size_t rank = 0; rank < report.ranks.size(); ++rank) {
      if (report.ranks[rank].gpu_busy < 0) continue;
      if (!has_gpus) family("lockstep_gpu_busy", "gauge", "Share of the time the GPU computes.");
      has_gpus = true;
      text += fmt::format("lockstep_gpu_busy{{run=\"{}\",rank=\"{}\"}} {}\n", name, rank,
                          metric_value(report.ranks[rank].gpu_busy));
    }
  }
  return text + "# EOF\n";
}

bool write_open_metrics(const std::string& path, const StepReport& report, std::string_view run) {
  return write_whole_file(path, open_metrics(report, run)) == 0;
}

}  // namespace lockstep::train
