#include "rl/embedded/world.h"

#include <fmt/format.h>

#include <algorithm>
#include <numeric>

#include "core/hash/counter.h"
#include "rl/chat/python_json.h"

namespace lockstep::rl::embedded {
namespace {

// Parts of each split, in hundredths of what there is.
constexpr std::array<int, 4> kCuts = {0, 60, 80, 100};

std::vector<int> shuffled(int begin, int end, uint64_t purpose, Kind kind) {
  std::vector<int> numbers(static_cast<size_t>(end - begin));
  std::iota(numbers.begin(), numbers.end(), begin);
  Draws draws(purpose, static_cast<int>(kind));
  for (size_t i = numbers.size() - 1; i > 0; --i)
    std::swap(numbers[i], numbers[draws.below(i + 1)]);
  return numbers;
}

using Numbers = std::array<std::vector<int>, 3>;

std::span<const int> part(const Numbers& numbers, Kind kind, Split split) {
  const auto& all = numbers[static_cast<size_t>(kind)];
  const auto index = static_cast<size_t>(split);
  const auto at = [&](size_t cut) { return all.size() * static_cast<size_t>(kCuts[cut]) / 100; };
  return std::span(all).subspan(at(index), at(index + 1) - at(index));
}

Numbers numbers(int begin, int end, uint64_t purpose) {
  return {shuffled(begin, end, purpose, Kind::Airline), shuffled(begin, end, purpose, Kind::Retail),
          shuffled(begin, end, purpose, Kind::Telecom)};
}

}  // namespace

const Second* World::second(int number) const {
  const auto found = std::find_if(seconds.begin(), seconds.end(),
                                  [number](const Second& s) { return s.number == number; });
  return found == seconds.end() ? nullptr : &*found;
}

std::span<const int> ids_of(Kind kind, Split split) {
  static const Numbers all = numbers(100, 1000, 11);
  return part(all, kind, split);
}

std::span<const int> seconds_of(Kind kind, Split split) {
  static const Numbers all = numbers(10, 100, 13);
  return part(all, kind, split);
}

std::string changed_state(const World& world) {
  // One record is the rule.
  std::vector<const Record*> changed;
  for (const auto& record : world.records) {
    if (!record.log.empty()) changed.push_back(&record);
  }
  std::sort(changed.begin(), changed.end(),
            [](const Record* a, const Record* b) { return a->id < b->id; });
  std::string text = "{";
  for (const Record* record : changed) {
    if (text.size() > 1) text += ", ";
    text += fmt::format("\"{}\": {{\"log\": {}, \"ref\": \"{}\"}}", record->id,
                        Json(record->log).dump(), record->ref);
  }
  return text + "}";
}

}  // namespace lockstep::rl::embedded
