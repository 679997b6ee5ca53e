#include "lockstep/comm/work.h"

namespace lockstep::comm {

void Pending::wait() {
  if (!over_) {
    over_ = true;
    try {
      finish();
    } catch (...) {
      error_ = std::current_exception();
    }
  }
  if (error_) std::rethrow_exception(error_);
}

bool Pending::poll() {
  if (over_) return true;
  try {
    return advance();
  } catch (...) {
    error_ = std::current_exception();
    over_ = true;
    return true;
  }
}

}  // namespace lockstep::comm
