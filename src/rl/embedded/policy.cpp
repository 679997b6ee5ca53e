#include "rl/embedded/policy.h"

#include <fmt/format.h>

#include <algorithm>

#include "lockstep/core/error.h"

namespace lockstep::rl::embedded {
namespace {

std::string_view airline(const Case& asked) {
  const Record& record = *asked.record;
  const Second& flight = *asked.second;
  const bool is_moved = flight.state == Departed;
  switch (asked.request) {
    case Request::CancelFlight: {
      if (is_moved) return "cancel/moved";
      const int reasons = (flight.state == Cancelled) + record.yes + (record.kind == Business);
      if (reasons == 0) return "cancel/denied";
      if (reasons > 1) return "cancel/several";
      if (record.yes) return "cancel/insured";
      return record.kind == Business ? "cancel/business" : "cancel/airline";
    }
    case Request::AddBags:
      if (is_moved) return "bags/moved";
      if (record.kind == Business) return "bags/free";
      return asked.consents ? "bags/yes" : "bags/no";
    default:
      if (is_moved) return "upgrade/moved";
      if (record.kind == Basic) return "upgrade/basic";
      if (flight.stock == 0) return "upgrade/seats";
      return asked.consents ? "upgrade/yes" : "upgrade/no";
  }
}

std::string_view retail(const Case& asked) {
  const auto status = asked.record->kind;
  const Second& item = *asked.second;
  switch (asked.request) {
    case Request::CancelOrder:
      if (status == Shipped) return "cancel/moved";
      if (status != Pending) return "cancel/status";
      return item.is_digital ? "cancel/digital" : "cancel/ok";
    case Request::Return:
      if (status == Shipped) return "return/moved";
      if (status != Delivered) return "return/status";
      return item.is_final ? "return/final" : "return/ok";
    case Request::Exchange:
      if (status == Shipped) return "exchange/moved";
      if (status != Delivered) return "exchange/status";
      if (item.stock == 0) return "exchange/stock";
      return asked.consents ? "exchange/yes" : "exchange/no";
    default:
      if (status == Shipped) return "zip/moved";
      return status == Pending ? "zip/ok" : "zip/status";
  }
}

std::string_view telecom(const Record& line) {
  if (!line.is_on) return line.owed == 0 ? "data/resume" : "data/pay";
  if (line.yes && !line.roams) return "data/roam";
  return line.left == 0 ? "data/refuel" : "data/moved";
}

}  // namespace

const Clause& deciding(const Case& asked) {
  const RequestKind& kind = kind_of(asked.request);
  const std::string_view name = kind.kind == Kind::Airline  ? airline(asked)
                                : kind.kind == Kind::Retail ? retail(asked)
                                                            : telecom(*asked.record);
  const auto found = std::find_if(kind.clauses.begin(), kind.clauses.end(),
                                  [name](const Clause& clause) { return clause.name == name; });
  if (found == kind.clauses.end()) throw Error(fmt::format("[rl] no clause '{}'", name));
  return *found;
}

}  // namespace lockstep::rl::embedded
