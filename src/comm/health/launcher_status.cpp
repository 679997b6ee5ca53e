#include "comm/health/launcher_status.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <vector>

#include "lockstep/core/environment.h"

namespace lockstep::comm {

LauncherStatus::LauncherStatus() : control_(Control::from_env()) {
  if (!control_) return;
  first_local_ = static_cast<int>(env_int("RANK", 0, 1 << 24).value_or(0) -
                                  env_int("LOCAL_RANK", 0, 1 << 24).value_or(0));
}

std::string LauncherStatus::given_up() const {
  return "was aborted" + (control_ ? control_->because() : "");
}

std::string LauncherStatus::given_up_with_fates() const {
  if (!control_ || is_explained()) return given_up();
  std::vector<std::string> ends;
  for (int local = 0; local < control_->local_ranks(); ++local) {
    if (const auto end = control_->fate(local))
      ends.push_back(fmt::format("rank {} {}", first_local_ + local, *end));
  }
  return ends.empty() ? given_up() : fmt::format("was aborted ({})", fmt::join(ends, ", "));
}

std::optional<std::string> LauncherStatus::fate(int rank) const {
  const int local = rank - first_local_;
  if (!control_ || local < 0 || local >= control_->local_ranks()) return std::nullopt;
  return control_->fate(local);
}

}  // namespace lockstep::comm
