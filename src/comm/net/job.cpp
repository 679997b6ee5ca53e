#include "comm/net/job.h"

#include <fmt/format.h>

namespace lockstep::comm {

NetFailure too_many(int from, int64_t sent, int64_t room) {
  return {.what = fmt::format("does not fit: rank {} sends {} bytes where {} are expected", from,
                              sent, room)};
}

NetFailure too_little(int to, int64_t room, int64_t sent) {
  return {.what = fmt::format("does not fit: rank {} expects {} bytes where {} are sent", to, room,
                              sent)};
}

}  // namespace lockstep::comm
