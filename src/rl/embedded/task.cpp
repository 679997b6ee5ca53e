#include "rl/embedded/task.h"

#include <fmt/format.h>

#include <algorithm>

#include "core/hash/counter.h"

namespace lockstep::rl::embedded {
namespace {

constexpr uint64_t kTasks = 21;  // the purpose of these draws
constexpr int kTries = 200;
constexpr size_t kRecords = 8;
constexpr size_t kSeconds = 4;

// Distinct numbers of `all`.
std::vector<int> draw_distinct(Draws& draws, std::span<const int> all, size_t count) {
  std::vector<int> drawn;
  while (drawn.size() < count) {
    const int number = draws.pick(all);
    if (std::find(drawn.begin(), drawn.end(), number) == drawn.end()) drawn.push_back(number);
  }
  return drawn;
}

int draw_int(Draws& draws, int first, int last) {
  return first + static_cast<int>(draws.below(static_cast<uint64_t>(last - first + 1)));
}

// At level 1 the second table never decides.
Second draw_second(Draws& draws, Kind kind, int number, bool is_plain) {
  constexpr std::array kStates = {Open, Open, Delayed, Cancelled, Departed};
  Second second{.number = number};
  if (kind == Kind::Airline) {
    second.state = draws.pick(kStates);
    second.stock = draws.chance(.5) ? 3 : 0;
    if (is_plain) second.state = Open, second.stock = 3;
    return second;
  }
  second.is_final = draws.chance(.5);
  second.stock = draws.chance(.5) ? 5 : 0;
  second.is_digital = draws.chance(.5);
  if (is_plain) second.is_final = second.is_digital = false, second.stock = 5;
  return second;
}

Record draw_record(Draws& draws, Kind kind, int id, int second, bool is_plain) {
  Record record{.id = id, .ref = draw_int(draws, 100, 999), .paid = draw_int(draws, 10, 99)};
  if (kind == Kind::Airline) {
    record.second = second;
    record.kind = draw_int(draws, Basic, Business);
    record.yes = draws.chance(.5);
  } else if (kind == Kind::Retail) {
    record.second = second;
    record.kind = draw_int(draws, Pending, Shipped);
    record.zip = draw_int(draws, 100, 999);
  } else {
    // Five situations, so that each clause is met often; what does not decide is drawn freely.
    const auto situation = draws.below(5);
    record.is_on = situation >= 2;
    record.yes = situation == 2 || draws.chance(.5);
    record.roams = situation != 2 && (record.yes || record.is_on || draws.chance(.5));
    record.owed = situation == 0 || (situation > 1 && draws.chance(.5)) ? 0 : record.paid;
    record.left = situation == 3   ? 0
                  : situation == 4 ? draw_int(draws, 1, 8)
                                   : draw_int(draws, 0, 8);
    if (is_plain) record.owed = record.left = 0;
  }
  return record;
}

// One of the list's, as often as its weight says.
template <class List, class Weight>
const auto& draw_weighted(Draws& draws, const List& list, const Weight& weight) {
  int total = 0;
  for (const auto& item : list) total += weight(item);
  int left = draw_int(draws, 0, total - 1);
  for (const auto& item : list) {
    if ((left -= weight(item)) < 0) return item;
  }
  return *std::begin(list);  // not reached
}

std::string draw_argument(Draws& draws, Request request) {
  switch (request) {
    case Request::AddBags:
      return std::to_string(draw_int(draws, 2, 5));
    case Request::Upgrade:
      return "business";
    case Request::SetZip:
      return std::to_string(draw_int(draws, 100, 999));
    case Request::RestoreData:
      return std::to_string(draw_int(draws, 1, 9));
    default:
      return "";
  }
}

// What surrounds a record: the world's numbers are drawn first, then records and second tables
// until the wanted clause decides.
void draw_world(Draws& draws, Task& task, const Clause& wanted) {
  const auto [kind, split, index, level] = task.number;
  const bool is_plain = level == 1;
  const auto ids = draw_distinct(draws, ids_of(kind, split), kRecords);
  const auto numbers = kind == Kind::Telecom
                           ? std::vector<int>{}
                           : draw_distinct(draws, seconds_of(kind, split), kSeconds);
  auto& world = task.world;
  world.kind = kind;
  world.records.resize(kRecords);
  for (const int number : numbers)
    world.seconds.push_back(draw_second(draws, kind, number, is_plain));
  const auto own = [&] { return numbers.empty() ? 0 : numbers.front(); };
  for (int attempt = 0; attempt < kTries; ++attempt) {
    world.records.front() = draw_record(draws, kind, ids.front(), own(), is_plain);
    if (!numbers.empty()) {
      world.seconds[0] = draw_second(draws, kind, numbers[0], is_plain);
      world.seconds[1] = draw_second(draws, kind, numbers[1], is_plain);
    }
    task.consents = draws.chance(.5);
    task.argument = draw_argument(draws, task.kind->request);
    if (task.kind->request == Request::Exchange) {
      task.wanted = numbers[1];
      task.argument = std::to_string(task.wanted);
    }
    task.clause = &deciding({.request = task.kind->request,
                             .record = &world.records.front(),
                             .second = task.second(),
                             .consents = task.consents});
    if (task.clause == &wanted) break;
  }
  for (size_t i = 1; i < kRecords; ++i) {
    const int second = numbers.empty() ? 0 : draws.pick(numbers);
    world.records[i] = draw_record(draws, kind, ids[i], second, is_plain);
  }
}

int draw_wrong_id(Draws& draws, const Task& task) {
  const auto& records = task.world.records;
  while (true) {
    const int id = draws.pick(ids_of(task.number.kind, task.number.split));
    if (std::none_of(records.begin(), records.end(),
                     [id](const Record& r) { return r.id == id; })) {
      return id;
    }
  }
}

}  // namespace

const Second* Task::second() const {
  if (world.seconds.empty()) return nullptr;
  return world.second(kind->request == Request::Exchange ? wanted : record().second);
}

Task make_task(const TaskNumber& number) {
  Task task{.number = number};
  Draws draws(kTasks, static_cast<int>(number.kind), static_cast<int>(number.split), number.index,
              number.level);
  task.kind = &draw_weighted(draws, requests_of(number.kind),
                             [](const RequestKind& kind) { return kind.weight; });
  const auto& clause = draw_weighted(draws, task.kind->clauses, [&](const Clause& known) {
    return number.level == 1 && !known.is_plain ? 0 : known.weight;
  });
  draw_world(draws, task, clause);
  task.withholds = draws.chance(number.level == 1 ? 0 : number.level == 2 ? .5 : .8);
  if (number.level == 3 && draws.chance(.3)) task.wrong_id = draw_wrong_id(draws, task);
  const bool is_train = number.split == Split::Train;
  const int phrasing = draw_int(draws, 0, (is_train ? kTrainPhrasings : kTestPhrasings) - 1);
  task.request = phrase(*task.kind, number.split, phrasing, task.argument);
  if (!task.withholds) {
    task.request += fmt::format(", {}", task.wrong_id != 0 ? task.wrong_id : task.record().id);
  }
  task.request += '.';
  return task;
}

std::string scenario_of(const Task& task) {
  std::string text = fmt::format("request: {}\nid: {}\n", task.request, task.record().id);
  // Told when the id is asked for the first time; in the request it was told already.
  if (task.wrong_id != 0 && task.withholds) text += fmt::format("first id: {}\n", task.wrong_id);
  constexpr std::array kNames = {std::pair{Request::Exchange, "item"},
                                 std::pair{Request::SetZip, "zip"},
                                 std::pair{Request::RestoreData, "GB"}};
  for (const auto& [request, name] : kNames) {
    if (task.kind->request == request) text += fmt::format("{}: {}\n", name, task.argument);
  }
  return text + fmt::format("Confirm: {}\n", task.consents ? "Yes." : "No.");
}

}  // namespace lockstep::rl::embedded
