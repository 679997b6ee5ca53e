#include "train/report/ranks.h"

#include <algorithm>

#include "train/report/text.h"

namespace lockstep::train {

Shares shares_of(const RunHistory& run) {
  double step = 0, communication = 0, data = 0, checkpoint = 0, steps = 0;
  for (const auto& rank : run.ranks) {
    step += rank.step_seconds;
    communication += rank.communication_seconds;
    data += rank.data_seconds;
    checkpoint += rank.checkpoint_seconds;
    steps += static_cast<double>(rank.steps);
  }
  if (step <= 0 || steps <= 0) return {};
  return {.step = step / steps,
          .compute = std::max(0.0, 1 - (communication + data + checkpoint) / step),
          .communication = communication / step,
          .data = data / step,
          .checkpoint = checkpoint / step};
}

bool knows_gpus(const RunHistory& run) {
  return std::any_of(run.ranks.begin(), run.ranks.end(),
                     [](const auto& rank) { return rank.gpu_reports > 0; });
}

std::vector<double> work_of_ranks(const RunHistory& run) {
  std::vector<double> seconds;
  for (const auto& rank : run.ranks) {
    seconds.push_back(rank.working_seconds() /
                      static_cast<double>(std::max<int64_t>(rank.steps, 1)));
  }
  return seconds;
}

size_t largest(const std::vector<double>& values) {
  return static_cast<size_t>(std::max_element(values.begin(), values.end()) - values.begin());
}

double median_without(std::vector<double> values, size_t without) {
  values.erase(values.begin() + static_cast<std::ptrdiff_t>(without));
  std::sort(values.begin(), values.end());
  const size_t half = values.size() / 2;
  return values.size() % 2 == 1 ? values[half] : (values[half - 1] + values[half]) / 2;
}

std::string rank_of(const RunHistory& run, size_t rank) {
  const std::vector<std::string> none;
  const auto& hosts = run.starts.empty() ? none : run.starts.back().hosts;
  const bool several =
      std::any_of(hosts.begin(), hosts.end(), [&](const auto& host) { return host != hosts[0]; });
  return rank_name(rank, several && rank < hosts.size() ? hosts[rank] : "");
}

}  // namespace lockstep::train
