// What stands in a task's database, and the tools that read and change it.
#pragma once

#include <array>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace lockstep::rl::embedded {

enum class Kind { Airline, Retail, Telecom };
enum class Split { Train, Dev, Test };

inline constexpr std::array<std::string_view, 3> kKinds = {"airline", "retail", "telecom"};
inline constexpr std::array<std::string_view, 3> kSplits = {"train", "dev", "test"};
inline constexpr std::array<std::string_view, 3> kCabins = {"basic", "economy", "business"};
inline constexpr std::array<std::string_view, 3> kStatuses = {"pending", "delivered", "shipped"};
inline constexpr std::array<std::string_view, 4> kFlights = {"open", "delayed", "cancelled",
                                                             "departed"};
enum Cabin { Basic, Economy, Business };
enum Status { Pending, Delivered, Shipped };
enum FlightState { Open, Delayed, Cancelled, Departed };

// A reservation, an order or a line: each domain uses some of the fields.
struct Record {
  int id = 0;
  int ref = 0;
  int paid = 0;
  int second = 0;      // its flight or item
  int kind = 0;        // Cabin or Status
  bool yes = false;    // insured; abroad
  bool is_on = false;  // the line is active
  bool roams = false;
  int zip = 0;
  int owed = 0;
  int left = 0;
  std::string log;  // what was written, "add_bags=2;"
};

// A flight or an item.
struct Second {
  int number = 0;
  int state = Open;
  int stock = 0;  // seats; pieces
  bool is_final = false;
  bool is_digital = false;
};

struct World {
  Kind kind = Kind::Airline;
  std::vector<Record> records;  // [0] is the one that the task is about
  std::vector<Second> seconds;

  const Second* second(int number) const;
};

// The numbers of a split: no two splits share one.
std::span<const int> ids_of(Kind kind, Split split);
std::span<const int> seconds_of(Kind kind, Split split);

enum class ToolKind { ShowRecord, ShowSecond, Write };

struct Tool {
  std::string_view name;
  ToolKind kind = ToolKind::Write;
  std::string_view argument = "";  // beside the id; of ShowSecond the only one
  bool costs = false;              // needs the user's consent
  std::string_view description = "";
};

std::span<const Tool> tools_of(Kind kind);

// What an agent looks a record up with.
std::string_view lookup_of(Kind kind);

// The tool's answer, which is an error where `is_error` says so. `arguments`: JSON text of an
// object.
struct Answer {
  std::string text;
  bool is_error = false;
  int id = 0;  // of the record that was read or changed; 0: of none
};
Answer answer(World& world, std::string_view tool, std::string_view arguments);

// The records that were changed, as JSON with sorted keys.
std::string changed_state(const World& world);

// The JSON text of a tool's schema.
std::string schema_of(const Tool& tool);

}  // namespace lockstep::rl::embedded
