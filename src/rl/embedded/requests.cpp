// What is asked, and how.

#include <algorithm>

#include "rl/embedded/policy.h"

namespace lockstep::rl::embedded {
namespace {

using enum Outcome;

// Airline: as uniform as the records allow.
constexpr std::array kCancelFlight = {
    Clause{.name = "cancel/airline", .outcome = Done},
    Clause{.name = "cancel/insured", .outcome = Done, .is_plain = true},
    Clause{.name = "cancel/business", .outcome = Done, .is_plain = true},
    Clause{.name = "cancel/several", .outcome = Done, .weight = 0},
    Clause{.name = "cancel/denied", .outcome = Denied, .is_plain = true},
    Clause{.name = "cancel/moved", .outcome = Moved},
};
constexpr std::array kAddBags = {
    Clause{.name = "bags/free", .outcome = Done, .is_plain = true},
    Clause{.name = "bags/yes", .outcome = Consented, .is_plain = true},
    Clause{.name = "bags/no", .outcome = Declined, .is_plain = true},
    Clause{.name = "bags/moved", .outcome = Moved},
};
constexpr std::array kUpgrade = {
    Clause{.name = "upgrade/yes", .outcome = Consented, .is_plain = true},
    Clause{.name = "upgrade/no", .outcome = Declined, .is_plain = true},
    Clause{.name = "upgrade/basic", .outcome = Denied, .is_plain = true},
    Clause{.name = "upgrade/seats", .outcome = Denied},
    Clause{.name = "upgrade/moved", .outcome = Moved},
};
// Retail: weighted so that an agent which never looks at the item decides at most two thirds of the
// tasks, and one that never looks at anything less than half.
constexpr std::array kCancelOrder = {
    Clause{.name = "cancel/ok", .outcome = Done, .weight = 8, .is_plain = true},
    Clause{.name = "cancel/status", .outcome = Denied, .weight = 1, .is_plain = true},
    Clause{.name = "cancel/digital", .outcome = Denied, .weight = 7},
    Clause{.name = "cancel/moved", .outcome = Moved, .weight = 4, .is_plain = true},
};
constexpr std::array kReturn = {
    Clause{.name = "return/ok", .outcome = Done, .weight = 8, .is_plain = true},
    Clause{.name = "return/status", .outcome = Denied, .weight = 1, .is_plain = true},
    Clause{.name = "return/final", .outcome = Denied, .weight = 7},
    Clause{.name = "return/moved", .outcome = Moved, .weight = 4, .is_plain = true},
};
constexpr std::array kExchange = {
    Clause{.name = "exchange/yes", .outcome = Consented, .weight = 5, .is_plain = true},
    Clause{.name = "exchange/no", .outcome = Declined, .weight = 5, .is_plain = true},
    Clause{.name = "exchange/status", .outcome = Denied, .weight = 1, .is_plain = true},
    Clause{.name = "exchange/stock", .outcome = Denied, .weight = 7},
    Clause{.name = "exchange/moved", .outcome = Moved, .weight = 2, .is_plain = true},
};
constexpr std::array kSetZip = {
    Clause{.name = "zip/ok", .outcome = Done, .weight = 2, .is_plain = true},
    Clause{.name = "zip/status", .outcome = Denied, .weight = 2, .is_plain = true},
    Clause{.name = "zip/moved", .outcome = Moved, .weight = 1, .is_plain = true},
};
constexpr std::array kRestoreData = {
    Clause{.name = "data/resume", .outcome = Resumed, .is_plain = true},
    Clause{.name = "data/pay", .outcome = Owes},
    Clause{.name = "data/roam", .outcome = Roaming, .is_plain = true},
    Clause{.name = "data/refuel", .outcome = Refuelled, .is_plain = true},
    Clause{.name = "data/moved", .outcome = Moved},
};

constexpr std::array kDecided = {Done, Denied, Moved};
constexpr std::array kBagEnds = {Done, Consented, Declined, Moved};
constexpr std::array kPaidEnds = {Consented, Declined, Denied, Moved};
constexpr std::array kDataEnds = {Resumed, Owes, Roaming, Refuelled, Moved};

constexpr std::array kRequests = {
    RequestKind{Request::CancelFlight,
                Kind::Airline,
                1,
                "cancel_reservation",
                "",
                kCancelFlight,
                kDecided,
                {"Cancel", "Please cancel", "I want to cancel", "I have to cancel"},
                {"my booking", "the booking", "my flight", "the flight"}},
    RequestKind{Request::AddBags,
                Kind::Airline,
                1,
                "add_bags",
                "",
                kAddBags,
                kBagEnds,
                {"Add", "Please add", "I want to add", "I have to add"},
                {"{} bags", "{} more bags", "{} bags to my booking", "{} more bags to the flight"}},
    RequestKind{Request::Upgrade,
                Kind::Airline,
                1,
                "set_cabin",
                "",
                kUpgrade,
                kPaidEnds,
                {"Move", "Please move", "I want to move", "I have to move"},
                {"me to business", "my booking to business", "the booking to business",
                 "my flight to business"}},
    RequestKind{Request::CancelOrder,
                Kind::Retail,
                3,
                "cancel_order",
                "",
                kCancelOrder,
                kDecided,
                {"Cancel", "Please cancel", "I want to cancel", "I have to cancel"},
                {"my order", "the order", "this order", "what I ordered"}},
    RequestKind{Request::Return,
                Kind::Retail,
                3,
                "return_order",
                "",
                kReturn,
                kDecided,
                {"Return", "Please take back", "I want to return", "I have to send back"},
                {"my order", "the order", "this order", "what I ordered"}},
    RequestKind{Request::Exchange,
                Kind::Retail,
                3,
                "exchange_order",
                "Which item?",
                kExchange,
                kPaidEnds,
                {"Exchange", "Please exchange", "I want to exchange", "I have to exchange"},
                {"my order", "the item", "this order", "what I ordered"}},
    RequestKind{Request::SetZip,
                Kind::Retail,
                1,
                "set_zip",
                "Which zip?",
                kSetZip,
                kDecided,
                {"Change", "Please change", "I want to change", "I have to change"},
                {"my zip", "the zip", "the zip of my order", "the zip of this order"}},
    RequestKind{Request::RestoreData,
                Kind::Telecom,
                1,
                "",
                "How many GB?",
                kRestoreData,
                kDataEnds,
                {"I have", "My phone has", "Now I have", "My line has"},
                {"no data", "no internet", "no data at all", "no internet any more"}},
};

constexpr std::string_view kAirlinePolicy =
    "You serve customers of an airline. Look up the reservation and its flight first.\n"
    "1. A flight that has departed: transfer, then say \"Transferred.\"\n"
    "2. Cancelling: only if the flight is cancelled, the reservation is insured or the cabin is "
    "business. Then cancel and say \"Done. Refund N.\" with what was paid; else say \"Not "
    "allowed.\"\n"
    "3. Bags are free in business. Else ask \"Confirm?\" first; without a yes say \"No change.\"\n"
    "4. To business: not from basic, and not without seats: \"Not allowed.\" Else ask \"Confirm?\" "
    "first; without a yes say \"No change.\"\n";
constexpr std::string_view kRetailPolicy =
    "You serve customers of a shop. Look up the order first.\n"
    "1. An order that is shipped: transfer, then say \"Transferred.\"\n"
    "2. Cancelling: only a pending order, and no digital item. Then say \"Done. Refund N.\" with "
    "what was paid; else say \"Not allowed.\"\n"
    "3. A new zip: only for a pending order. Ask \"Which zip?\"\n"
    "4. Returning: only a delivered order, and no final item. Then say \"Done. Refund N.\"\n"
    "5. Exchanging: only a delivered order. Ask \"Which item?\"; it must be in stock. Ask "
    "\"Confirm?\" first; without a yes say \"No change.\"\n";
constexpr std::string_view kTelecomPolicy =
    "You serve customers of a phone company whose data does not work. Look up the line first.\n"
    "1. Suspended and nothing owed: resume the line. Suspended and something owed: say \"Please "
    "pay "
    "N.\"\n"
    "2. Else, abroad without roaming: enable roaming.\n"
    "3. Else, nothing left: ask \"How many GB?\" and refuel.\n"
    "4. Else transfer, then say \"Transferred.\"\n";

}  // namespace

std::span<const RequestKind> requests_of(Kind kind) {
  const auto begin = std::find_if(kRequests.begin(), kRequests.end(),
                                  [kind](const auto& known) { return known.kind == kind; });
  const auto end = std::find_if(begin, kRequests.end(),
                                [kind](const auto& known) { return known.kind != kind; });
  return {begin, end};
}

const RequestKind& kind_of(Request request) { return kRequests[static_cast<size_t>(request)]; }

std::string_view policy_of(Kind kind) {
  return std::array{kAirlinePolicy, kRetailPolicy, kTelecomPolicy}[static_cast<size_t>(kind)];
}

std::string phrase(const RequestKind& kind, Split split, int index, std::string_view argument) {
  // Opening i with rest j: i + j = 0 modulo 4 are the other splits', 1 and 2 those of training, so
  // that each word of either stands in training.
  const int opening = index % 4;
  const int sum = split == Split::Train ? 1 + index / 4 : 0;
  const auto rest = kind.rest[static_cast<size_t>((sum - opening + 4) % 4)];
  std::string text(kind.openings[static_cast<size_t>(opening)]);
  text += ' ';
  text += rest;
  if (const size_t at = text.find("{}"); at != std::string::npos) text.replace(at, 2, argument);
  return text;
}

}  // namespace lockstep::rl::embedded
