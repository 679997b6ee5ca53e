// The tools: as in tau2 they do not check the policy.
#include <fmt/format.h>

#include <algorithm>

#include "core/number.h"
#include "rl/chat/python_json.h"
#include "rl/embedded/flat_json.h"
#include "rl/embedded/world.h"

namespace lockstep::rl::embedded {
namespace {

constexpr std::array kAirline = {
    Tool{.name = "get_reservation",
         .kind = ToolKind::ShowRecord,
         .description = "Shows a reservation."},
    Tool{.name = "get_flight",
         .kind = ToolKind::ShowSecond,
         .argument = "flight",
         .description = "Shows the state of a flight and its free seats."},
    Tool{.name = "cancel_reservation", .description = "Cancels a reservation and refunds it."},
    Tool{.name = "add_bags",
         .argument = "bags",
         .costs = true,
         .description = "Adds bags to a reservation. Costs money."},
    Tool{.name = "set_cabin",
         .argument = "cabin",
         .costs = true,
         .description = "Changes the cabin of a reservation. Costs money."},
    Tool{.name = "transfer", .description = "Hands the customer over to a colleague."},
};
constexpr std::array kRetail = {
    Tool{.name = "get_order", .kind = ToolKind::ShowRecord, .description = "Shows an order."},
    Tool{.name = "get_item",
         .kind = ToolKind::ShowSecond,
         .argument = "item",
         .description = "Shows an item and its stock."},
    Tool{.name = "cancel_order", .description = "Cancels an order and refunds it."},
    Tool{.name = "return_order", .description = "Takes an order back and refunds it."},
    Tool{.name = "exchange_order",
         .argument = "item",
         .costs = true,
         .description = "Exchanges an order for another item. Costs money."},
    Tool{.name = "set_zip", .argument = "zip", .description = "Changes where an order is sent to."},
    Tool{.name = "transfer", .description = "Hands the customer over to a colleague."},
};
constexpr std::array kTelecom = {
    Tool{.name = "get_line", .kind = ToolKind::ShowRecord, .description = "Shows a line."},
    Tool{.name = "get_bill",
         .kind = ToolKind::ShowRecord,
         .description = "Shows what is owed for a line."},
    Tool{.name = "get_usage",
         .kind = ToolKind::ShowRecord,
         .description = "Shows how many GB a line has left."},
    Tool{.name = "resume_line", .description = "Resumes a suspended line."},
    Tool{.name = "enable_roaming", .description = "Turns roaming on."},
    Tool{.name = "refuel_data", .argument = "gb", .description = "Adds GB to a line."},
    Tool{.name = "transfer", .description = "Hands the customer over to a colleague."},
};

std::string_view yes(bool is_so) { return is_so ? "yes" : "no"; }

std::string show(const Record& r, std::string_view tool) {
  if (tool == "get_reservation") {
    return fmt::format(
        R"({{"ref": "{}", "flight": "{}", "cabin": "{}", "insured": "{}", "paid": "{}"}})", r.ref,
        r.second, kCabins[static_cast<size_t>(r.kind)], yes(r.yes), r.paid);
  }
  if (tool == "get_order") {
    return fmt::format(R"({{"ref": "{}", "item": "{}", "status": "{}", "paid": "{}"}})", r.ref,
                       r.second, kStatuses[static_cast<size_t>(r.kind)], r.paid);
  }
  if (tool == "get_bill") return fmt::format(R"({{"owed": "{}"}})", r.owed);
  if (tool == "get_usage") return fmt::format(R"({{"left": "{}"}})", r.left);
  return fmt::format(R"({{"ref": "{}", "line": "{}", "abroad": "{}", "roaming": "{}"}})", r.ref,
                     r.is_on ? "active" : "suspended", yes(r.yes), r.roams ? "on" : "off");
}

std::string show(Kind kind, const Second& s) {
  if (kind == Kind::Airline) {
    return fmt::format(R"({{"state": "{}", "seats": "{}"}})",
                       kFlights[static_cast<size_t>(s.state)], s.stock);
  }
  return fmt::format(R"({{"final": "{}", "stock": "{}", "digital": "{}"}})", yes(s.is_final),
                     s.stock, yes(s.is_digital));
}

// The number that this text is, as it is written here: "017" is none.
std::optional<int> number(const std::optional<std::string>& text) {
  if (!text || text->starts_with('0')) return std::nullopt;
  const auto value = whole_number_from<int>(*text);
  return value && *value >= 0 ? value : std::nullopt;
}

Answer failed(std::string text) { return {.text = "Error: " + std::move(text), .is_error = true}; }

}  // namespace

std::span<const Tool> tools_of(Kind kind) {
  if (kind == Kind::Airline) return kAirline;
  if (kind == Kind::Retail) return kRetail;
  return kTelecom;
}

std::string_view lookup_of(Kind kind) { return tools_of(kind).front().name; }

Answer answer(World& world, std::string_view name, std::string_view arguments) {
  const auto tools = tools_of(world.kind);
  const auto tool = std::find_if(tools.begin(), tools.end(),
                                 [name](const Tool& known) { return known.name == name; });
  if (tool == tools.end()) return failed("no such tool");
  const FlatJson given(arguments);
  const std::string_view key = tool->kind == ToolKind::ShowSecond ? tool->argument : "id";
  if (!given.has(key)) return failed(fmt::format("missing {}", key));
  const auto id = number(given.text(key));
  if (tool->kind == ToolKind::ShowSecond) {
    const Second* second = id ? world.second(*id) : nullptr;
    if (second == nullptr) return failed("not found");
    return {.text = show(world.kind, *second)};
  }
  const auto record = std::find_if(world.records.begin(), world.records.end(),
                                   [&](const Record& r) { return id && r.id == *id; });
  if (record == world.records.end()) return failed("not found");
  if (tool->kind == ToolKind::ShowRecord) return {.text = show(*record, name), .id = record->id};
  std::string written(name);
  if (!tool->argument.empty()) {
    const auto value = given.text(tool->argument);
    if (!value) return failed(fmt::format("missing {}", tool->argument));
    written += "=" + *value;
  }
  record->log += written + ";";
  return {.text = "ok", .id = record->id};
}

std::string schema_of(const Tool& tool) {
  Json properties = Json::object();
  Json required = Json::array();
  const auto add = [&](std::string_view argument) {
    properties[std::string(argument)] = {{"type", "string"}};
    required.push_back(argument);
  };
  if (tool.kind != ToolKind::ShowSecond) add("id");
  if (!tool.argument.empty()) add(tool.argument);
  return python_json(
      {{"type", "function"},
       {"function",
        {{"name", tool.name},
         {"description", tool.description},
         {"parameters",
          {{"type", "object"}, {"properties", properties}, {"required", required}}}}}});
}

}  // namespace lockstep::rl::embedded
