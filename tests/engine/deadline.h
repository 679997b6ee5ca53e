// How long a client of the store waits.
#pragma once

#include <chrono>

#include "comm/store/client.h"

namespace lockstep::comm {

inline StoreClient::Deadline in(std::chrono::milliseconds time) {
  return StoreClient::Clock::now() + time;
}

}  // namespace lockstep::comm
