#include "comm/health/launcher_status.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <utility>
#include <vector>

#include "lockstep/core/environment.h"

namespace lockstep::comm {

std::string rank_text(int rank, int number, std::string more) {
  if (number != rank)
    more += fmt::format("{}rank {} of the world", more.empty() ? "" : ", ", number);
  return more.empty() ? fmt::format("rank {}", rank) : fmt::format("rank {} ({})", rank, more);
}

LauncherStatus::LauncherStatus(std::optional<Numbers> numbers) : control_(Control::from_env()) {
  if (numbers) numbers_ = std::move(numbers->of_job);
  if (!control_) return;
  const auto rank = env_int("RANK", 0, 1 << 24).value_or(0);
  first_local_ = static_cast<int>(rank - env_int("LOCAL_RANK", 0, 1 << 24).value_or(0));
  if (!numbers) return;
  // A rank's children may have inherited its variables, and number themselves.
  const auto world = env_int("WORLD_SIZE", 1, 1 << 24).value_or(1);
  knows_fates_ =
      !numbers_.empty() && numbers_.at(numbers->own) == rank &&
      std::all_of(numbers_.begin(), numbers_.end(), [&](int number) { return number < world; });
}

std::string LauncherStatus::abort_text() const {
  return "was aborted" + (control_ ? control_->because() : "");
}

std::string LauncherStatus::abort_text_with_ends() const {
  if (!control_ || is_explained()) return abort_text();
  std::vector<std::string> ends;
  for (int local = 0; local < control_->local_ranks(); ++local) {
    if (const auto end = control_->fate(local))
      ends.push_back(fmt::format("rank {} {}", first_local_ + local, *end));
  }
  return ends.empty() ? abort_text() : fmt::format("was aborted ({})", fmt::join(ends, ", "));
}

std::optional<std::string> LauncherStatus::fate(int rank) const {
  const int local = number_of(rank) - first_local_;
  if (!control_ || !knows_fates_ || local < 0 || local >= control_->local_ranks())
    return std::nullopt;
  return control_->fate(local);
}

}  // namespace lockstep::comm
