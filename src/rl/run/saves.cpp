#include "rl/run/saves.h"

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <iterator>

#include "lockstep/core/error.h"
#include "lockstep/core/log.h"

namespace lockstep::rl {
namespace {

// No room, no room for this user, or a limit on the size of files: as an error of any rank says.
bool is_of_full_disk(const std::string& error) {
  constexpr int kFull[] = {ENOSPC, EDQUOT, EFBIG};
  return std::any_of(std::begin(kFull), std::end(kFull),
                     [&](int code) { return error.find(std::strerror(code)) != error.npos; });
}

}  // namespace

void Saves::attempt(const std::string& folder, const std::function<void()>& save) {
  try {
    save();
    missing_.erase(folder);
  } catch (const Error& error) {
    if (strict_ || !is_of_full_disk(error.what())) throw;
    missing_[folder] = error.what();
    if (!warns_) return;
    log::warn(std::string(error.what()) +
              "; training continues without this checkpoint, and the run will end with an error "
              "(--strict-save ends it at once)");
  }
}

std::string Saves::problem() const {
  return missing_.empty() ? ""
                          : missing_.begin()->second +
                                ": the run ended without this checkpoint, all else is written";
}

}  // namespace lockstep::rl
