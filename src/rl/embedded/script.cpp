// What an agent says to bring a task to an end.
#include <fmt/format.h>

#include "rl/embedded/task.h"

namespace lockstep::rl::embedded {
namespace {

std::string id_argument(int id) { return fmt::format("{{\"id\": \"{}\"}}", id); }

// Whether the second table is what decides, after the first.
bool needs_second(const Task& task) {
  switch (task.kind->request) {
    case Request::CancelFlight:
    case Request::AddBags:
    case Request::Upgrade:
      return true;
    case Request::CancelOrder:
      return task.record().kind == Pending;
    case Request::Return:
    case Request::Exchange:
      return task.record().kind == Delivered;
    default:
      return false;
  }
}

}  // namespace

std::string call_text(std::string_view name, std::string_view arguments) {
  return fmt::format("<tool_call>\n{{\"name\": \"{}\", \"arguments\": {}}}\n</tool_call>", name,
                     arguments);
}

std::string closing(const Task& task, Outcome outcome) {
  std::string text;
  switch (outcome) {
    case Outcome::Denied:
      text = "Not allowed.";
      break;
    case Outcome::Moved:
      text = "Transferred.";
      break;
    case Outcome::Declined:
      text = "No change.";
      break;
    case Outcome::Owes:
      text = fmt::format("Please pay {}.", task.record().owed);
      break;
    default:
      text = "Done.";
  }
  const auto request = task.kind->request;
  if (outcome == Outcome::Done && (request == Request::CancelFlight ||
                                   request == Request::CancelOrder || request == Request::Return)) {
    text += fmt::format(" Refund {}.", task.record().paid);
  }
  return text + fmt::format(" Ref {}.", task.record().ref);
}

ToolCall write_of(const Task& task, Outcome outcome) {
  const int id = task.record().id;
  const auto with = [&](std::string_view tool, std::string_view name) {
    return ToolCall{
        .name = std::string(tool),
        .arguments = fmt::format("{{\"id\": \"{}\", \"{}\": \"{}\"}}", id, name, task.argument)};
  };
  switch (outcome) {
    case Outcome::Moved:
      return {.name = "transfer", .arguments = id_argument(id)};
    case Outcome::Resumed:
      return {.name = "resume_line", .arguments = id_argument(id)};
    case Outcome::Roaming:
      return {.name = "enable_roaming", .arguments = id_argument(id)};
    case Outcome::Refuelled:
      return with("refuel_data", "gb");
    case Outcome::Done:
    case Outcome::Consented:
      for (const Tool& tool : tools_of(task.number.kind)) {
        if (tool.name != task.kind->write) continue;
        if (!tool.argument.empty()) return with(tool.name, tool.argument);
        return {.name = std::string(tool.name), .arguments = id_argument(id)};
      }
      return {};
    default:
      return {};
  }
}

std::vector<std::string> script(const Task& task, Outcome outcome, Looks looks) {
  const Record& record = task.record();
  const Kind kind = task.number.kind;
  const auto request = task.kind->request;
  std::vector<std::string> lines;
  const auto call = [&](std::string_view name, std::string_view arguments) {
    lines.push_back(call_text(name, arguments));
  };
  if (task.withholds) lines.emplace_back("Which id?");
  if (task.wrong_id != 0) {
    call(lookup_of(kind), id_argument(task.wrong_id));
    lines.emplace_back("Which id?");
  }
  call(lookup_of(kind), id_argument(record.id));
  if (kind == Kind::Telecom) {
    if (outcome == Outcome::Resumed || outcome == Outcome::Owes) {
      call("get_bill", id_argument(record.id));
    } else if (outcome == Outcome::Refuelled || outcome == Outcome::Moved) {
      call("get_usage", id_argument(record.id));
    }
    if (outcome == Outcome::Refuelled) lines.emplace_back(task.kind->question);
  } else if (kind == Kind::Airline) {
    call("get_flight", fmt::format("{{\"flight\": \"{}\"}}", record.second));
  } else {
    const bool asks = outcome == Outcome::Consented || outcome == Outcome::Declined;
    const bool looks_up = needs_second(task) == (looks == Looks::AsNeeded) || asks;
    const bool is_exchange = request == Request::Exchange;
    if (is_exchange && looks_up) lines.emplace_back(task.kind->question);
    if (looks_up && request != Request::SetZip) {
      call("get_item",
           fmt::format("{{\"item\": \"{}\"}}", is_exchange ? task.wanted : record.second));
    }
    if (request == Request::SetZip && outcome == Outcome::Done) {
      lines.emplace_back(task.kind->question);
    }
  }
  if (outcome == Outcome::Consented || outcome == Outcome::Declined) lines.emplace_back("Confirm?");
  if (const auto write = write_of(task, outcome); !write.name.empty()) {
    call(write.name, write.arguments);
  }
  lines.push_back(closing(task, outcome));
  return lines;
}

}  // namespace lockstep::rl::embedded
