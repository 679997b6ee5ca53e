// Lines of a log, which may be cut, damaged or not a log's at all.
#include <fmt/format.h>

#include <cerrno>
#include <cmath>
#include <cstring>
#include <filesystem>
#include <iterator>
#include <limits>
#include <nlohmann/json.hpp>

#include "lockstep/core/error.h"
#include "lockstep/train/run_history.h"
#include "train/report/page/transfer.h"

namespace lockstep::train {
namespace {

constexpr size_t kLongestText = 2000;
constexpr size_t kMostEntries = 2000;  // of config, environment, values
constexpr int64_t kLargest = int64_t{1} << 53;

// What a line has in place of something else.
struct Damage {
  std::string what;
};

double number_of(const nlohmann::json& value, const char* key) {
  if (value.is_number()) return value.get<double>();
  if (value.is_string()) {
    const auto& text = value.get_ref<const std::string&>();
    if (text == "NaN") return std::numeric_limits<double>::quiet_NaN();
    if (text == "Infinity") return std::numeric_limits<double>::infinity();
    if (text == "-Infinity") return -std::numeric_limits<double>::infinity();
  }
  throw Damage{fmt::format("{} is not a number", key)};
}

// As large as a double counts exactly, so that sums do not overflow.
int64_t whole(const nlohmann::json& value, const char* key) {
  if (value.is_number()) {  // programs that pass logs on may write 1e8
    const double about = value.get<double>();
    if (about >= 0 && about <= static_cast<double>(kLargest) && about == std::floor(about)) {
      return value.get<int64_t>();
    }
  }
  throw Damage{fmt::format("{} is not a whole number from 0 to 2^53", key)};
}

const nlohmann::json* member(const nlohmann::json& object, const char* key) {
  const auto found = object.find(key);
  return found == object.end() || found->is_null() ? nullptr : &*found;
}

double number_in(const nlohmann::json& object, const char* key, double otherwise = 0) {
  const nlohmann::json* value = member(object, key);
  return value == nullptr ? otherwise : number_of(*value, key);
}

std::optional<double> number_if(const nlohmann::json& object, const char* key) {
  const nlohmann::json* value = member(object, key);
  return value == nullptr ? std::nullopt : std::optional(number_of(*value, key));
}

int64_t whole_in(const nlohmann::json& object, const char* key, int64_t otherwise = 0) {
  const nlohmann::json* value = member(object, key);
  return value == nullptr ? otherwise : whole(*value, key);
}

// A finite time or duration that is not negative.
double seconds_in(const nlohmann::json& value, const char* key) {
  const double seconds = number_of(value, key);
  if (seconds >= 0 && seconds < 1e12) return seconds;
  throw Damage{fmt::format("{} is not a time", key)};
}
double seconds_in_object(const nlohmann::json& object, const char* key) {
  const nlohmann::json* value = member(object, key);
  return value == nullptr ? 0 : seconds_in(*value, key);
}

std::string text_of(const nlohmann::json& value, const char* key) {
  if (!value.is_string()) throw Damage{fmt::format("{} is not a string", key)};
  std::string text = value.get<std::string>();
  if (text.size() <= kLongestText) return text;
  size_t end = kLongestText;
  while (end > 0 && (static_cast<unsigned char>(text[end]) & 0xC0) == 0x80) --end;  // in a letter
  return text.substr(0, end) + " ...";
}

std::string text_in(const nlohmann::json& object, const char* key) {
  const nlohmann::json* value = member(object, key);
  return value == nullptr ? "" : text_of(*value, key);
}

template <class Value, class Read>
std::map<std::string, Value> map_in(const nlohmann::json& object, const char* key,
                                    const Read& read) {
  std::map<std::string, Value> all;
  const nlohmann::json* value = member(object, key);
  if (value == nullptr) return all;
  if (!value->is_object()) throw Damage{fmt::format("{} is not an object", key)};
  for (const auto& [name, one] : value->items()) {
    if (all.size() >= kMostEntries) break;
    all.emplace(name.substr(0, kLongestText), read(one, key));
  }
  return all;
}

RunStart start_of(const nlohmann::json& line) {
  const int64_t version = whole_in(line, "version", 0);
  if (version > kRunLogVersion) {
    throw Error(
        fmt::format("[metrics] the log is of version {}, this program reads up to {}: use "
                    "the program `lockstep` that belongs to the run's library",
                    version, kRunLogVersion));
  }
  if (version < 1) throw Damage{"version is missing"};
  RunStart start{.name = text_in(line, "name")};
  start.ranks =
      static_cast<int>(std::min<int64_t>(whole_in(line, "ranks", 1), RunHistory::kMostRanks));
  start.resumed_at = whole_in(line, "resumed_at", -1);
  start.total_steps = whole_in(line, "total_steps");
  start.restart = static_cast<int>(std::min<int64_t>(whole_in(line, "restart"), 1 << 20));
  start.config = map_in<std::string>(line, "config", text_of);
  start.environment = map_in<std::string>(line, "environment", text_of);
  if (const nlohmann::json* hosts = member(line, "hosts")) {
    if (!hosts->is_array() || hosts->size() > RunHistory::kMostRanks) {
      throw Damage{"hosts is not a list"};
    }
    for (const auto& host : *hosts) start.hosts.push_back(text_of(host, "hosts"));
  }
  return start;
}

// A list of ranks' values; all lists of a line are equally long.
template <class Read>
void column(const nlohmann::json& ranks, const char* key, std::vector<RankFigures>& figures,
            const Read& read) {
  const nlohmann::json* values = member(ranks, key);
  if (values == nullptr) return;
  const bool fits = values->is_array() && values->size() <= RunHistory::kMostRanks &&
                    (figures.empty() || figures.size() == values->size());
  if (!fits) throw Damage{fmt::format("ranks.{} is not a list with a value for each rank", key)};
  figures.resize(values->size());
  for (size_t i = 0; i < figures.size(); ++i) read(figures[i], (*values)[i]);
}

StepReport report_of(const nlohmann::json& line) {
  if (member(line, "step") == nullptr) throw Damage{"step is missing"};
  StepReport report{.step = whole_in(line, "step"), .steps = whole_in(line, "steps", 1)};
  report.epoch = whole_in(line, "epoch");
  report.seconds = seconds_in_object(line, "seconds");
  report.loss = number_if(line, "loss");
  report.mean_loss = number_if(line, "mean_loss");
  report.learning_rate = number_if(line, "learning_rate");
  report.gradient_norm = number_if(line, "gradient_norm");
  report.samples = whole_in(line, "samples");
  report.samples_per_second = number_in(line, "samples_per_second");
  report.values = map_in<double>(line, "values", number_of);
  const nlohmann::json* ranks = member(line, "ranks");
  if (ranks == nullptr) return report;
  if (!ranks->is_object()) throw Damage{"ranks is not an object"};
  const auto seconds = [&](const char* key, double RankFigures::*member_of) {
    column(*ranks, key, report.ranks, [&](RankFigures& figures, const nlohmann::json& value) {
      figures.*member_of = seconds_in(value, key);
    });
  };
  seconds("step_seconds", &RankFigures::step_seconds);
  seconds("communication_seconds", &RankFigures::communication_seconds);
  seconds("data_seconds", &RankFigures::data_seconds);
  seconds("checkpoint_seconds", &RankFigures::checkpoint_seconds);
  column(*ranks, "memory_bytes", report.ranks,
         [](RankFigures& figures, const nlohmann::json& value) {
           figures.memory_bytes = whole(value, "memory_bytes");
         });
  column(*ranks, "gpu_busy", report.ranks, [](RankFigures& figures, const nlohmann::json& value) {
    if (value.is_null()) return;
    const double busy = number_of(value, "gpu_busy");
    if (busy >= 0 && busy <= 1) figures.gpu_busy = busy;
  });
  return report;
}

LogRecord record_of(const nlohmann::json& line) {
  const std::string type = text_in(line, "type");
  if (type == "run") return start_of(line);
  if (type == "step") return report_of(line);
  if (type == "evaluation") {
    return EvaluationReport{.step = whole_in(line, "step"),
                            .seconds = seconds_in_object(line, "seconds"),
                            .metrics = map_in<double>(line, "metrics", number_of)};
  }
  if (type == "event") {
    const int64_t rank = whole_in(line, "rank", -1);
    return Event{.kind = text_in(line, "kind"),
                 .step = whole_in(line, "step"),
                 .seconds = seconds_in_object(line, "seconds"),
                 .rank = rank > 1 << 30 ? -1 : static_cast<int>(rank),
                 .text = text_in(line, "text"),
                 .advice = text_in(line, "advice")};
  }
  if (type == "end") {
    const nlohmann::json* failed = member(line, "failed");
    return RunEnd{.step = whole_in(line, "step"),
                  .seconds = seconds_in_object(line, "seconds"),
                  .outcome = text_in(line, "outcome"),
                  .failed = failed != nullptr && failed->is_boolean() && failed->get<bool>()};
  }
  throw Damage{"unknown type of line"};
}

}  // namespace

std::optional<LogRecord> parse_log_line(std::string_view line, double& unix_seconds,
                                        std::string& fault) {
  const nlohmann::json parsed = nlohmann::json::parse(line, nullptr, /*allow_exceptions=*/false);
  if (parsed.is_discarded() || !parsed.is_object()) {
    fault = "not a JSON object";
    return std::nullopt;
  }
  try {
    unix_seconds = seconds_in_object(parsed, "time");
    return record_of(parsed);
  } catch (const Damage& damage) {
    fault = damage.what;
    return std::nullopt;
  }
}

RunLogReader::RunLogReader(const std::string& path) : path_(path) {
  std::error_code error;
  if (std::filesystem::is_directory(path, error)) path_ = path + "/metrics.jsonl";
  file_.open(path_, std::ios::binary);
  if (!file_ && errno != ENOENT && errno != ENOTDIR) {
    throw Error(fmt::format("[metrics] {} cannot be opened: {}", path_, std::strerror(errno)));
  }
  if (!file_ || std::filesystem::is_directory(path_, error)) {
    throw Error(
        fmt::format("[metrics] there is no log {}: name a run's folder, in which training "
                    "writes metrics.jsonl (logging.output_dir), or the file",
                    path_));
  }
}

void RunLogReader::take(std::string_view line, RunHistory& history) {
  if (!line.empty() && line.back() == '\r') line.remove_suffix(1);
  if (line.empty() && !too_long_) return;
  ++history.lines;
  double time = 0;
  std::string fault = "longer than a line may be";
  const auto record =
      std::exchange(too_long_, false) ? std::nullopt : parse_log_line(line, time, fault);
  if (record) return history.add(*record, time);
  if (history.skipped_lines++ == 0) {
    history.first_fault = fmt::format("line {}: {}", history.lines, fault);
  }
}

bool RunLogReader::poll(RunHistory& history) {
  history.path = path_;
  std::string chunk(size_t{1} << 16, '\0');
  bool any = false;
  file_.clear();  // of the end that was there before
  while (file_.read(chunk.data(), static_cast<std::streamsize>(chunk.size())), file_.gcount() > 0) {
    any = true;
    std::string_view bytes(chunk.data(), static_cast<size_t>(file_.gcount()));
    for (size_t end; (end = bytes.find('\n')) != std::string_view::npos;
         bytes.remove_prefix(end + 1)) {
      if (rest_.empty()) {
        take(bytes.substr(0, end), history);
        continue;
      }
      rest_ += bytes.substr(0, end);
      take(rest_, history);
      rest_.clear();
    }
    rest_ += bytes;
    if (rest_.size() > kLongestLine) {
      rest_.resize(1);  // enough to be a line
      too_long_ = true;
    }
  }
  return any;
}

void RunLogReader::finish(RunHistory& history) {
  poll(history);
  if (!rest_.empty()) take(rest_, history);
  rest_.clear();
}

RunHistory read_run(const std::string& path) {
  RunLogReader reader(path);
  RunHistory history;
  reader.finish(history);
  if (history.starts.empty() && history.reports == 0) {
    throw Error(fmt::format("[metrics] {} has no run in it{}{}", reader.path(),
                            history.first_fault.empty() ? "" : ": ", history.first_fault));
  }
  const auto beside = std::filesystem::path(reader.path()).parent_path() / "metrics.json";
  if (std::ifstream file(beside); file) {
    const std::string text(std::istreambuf_iterator<char>(file), {});
    history.transfer = transfer_of(text);
  }
  return history;
}

}  // namespace lockstep::train
