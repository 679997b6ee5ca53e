#include "comm/health/call_numbers.h"

#include <fmt/format.h>

#include "comm/text.h"
#include "core/flight/record.h"

namespace lockstep::comm {

Notice CallNumbers::next(const Request& request) {
  Notice notice{.lane = kCollectives, .signature = signature_of(request), .advice = request.advice};
  if (request.what == Collective::Send) {
    notice.lane = fmt::format("{}>{}", rank_, request.peer);
    notice.number = ++sent_[request.peer];
  } else if (request.what == Collective::Recv) {
    notice.lane = fmt::format("{}>{}", request.peer, rank_);
    notice.number = ++received_[request.peer];
  } else {
    notice.number = ++collectives_;
    flight::number(request.call, notice.number);
  }
  notice.text = text_of(request, notice.number);
  return notice;
}

}  // namespace lockstep::comm
