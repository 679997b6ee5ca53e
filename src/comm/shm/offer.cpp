#include "comm/shm/offer.h"

#include "lockstep/core/error.h"

namespace lockstep::comm {

Offer make_offer(Segment& segment, int64_t bytes, const std::vector<std::string>& doors) {
  Offer offer{};
  try {
    segment = Segment::create(bytes, doors);
    offer.handle = segment.handle();
  } catch (const CommError& error) {
    set_text(offer.problem, error.what());
  }
  return offer;
}

std::vector<std::string> others_of(const std::vector<std::string>& doors) {
  return {doors.begin() + 1, doors.end()};
}

Segment attached(const Offer& offer) {
  if (offer.handle.bytes < 0) throw CommError(offer.problem);
  return Segment::attach(offer.handle);
}

}  // namespace lockstep::comm
