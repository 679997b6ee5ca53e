// `lockstep inspect` and `verify`.
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cmath>
#include <nlohmann/json.hpp>
#include <set>
#include <sstream>

#include "checkpoints/commands.h"
#include "core/counted.h"
#include "core/number.h"
#include "lockstep/checkpoint/directory.h"
#include "lockstep/checkpoint/export.h"
#include "lockstep/checkpoint/tensor_files.h"
#include "lockstep/core/error.h"
#include "text/unicode.h"

namespace lockstep::tool {
namespace {

using checkpoint::StoredTensor;
using checkpoint::TensorFiles;
using Json = nlohmann::ordered_json;

constexpr size_t kLongestValue = 200;  // bytes of one that are printed; --json has them all

// A number that JSON cannot say is a text: "inf", "nan".
struct ToJson {
  Json operator()(double value) const {
    return std::isfinite(value) ? Json(value) : Json(fmt::format("{}", value));
  }
  Json operator()(const std::vector<double>& values) const {
    Json list = Json::array();
    for (const double value : values) list.push_back((*this)(value));
    return list;
  }
  template <class T>
  Json operator()(const T& value) const {
    return value;
  }
};

// The numbers of a text that has them with all their bits ("a\t0x1.8p-3\n") as they are read: "a
// 0.1875". Other texts stay as they are.
std::string with_decimals(const std::string& text) {
  std::istringstream words(text);
  std::string all;
  bool has_any = false;
  for (std::string word; words >> word;) {
    const bool is_hexadecimal = word.starts_with("0x") || word.starts_with("-0x");
    const bool has_exponent = is_hexadecimal && word.find('p') != word.npos;
    const auto number = has_exponent ? number_from(word) : std::nullopt;
    has_any = has_any || number;
    all += (all.empty() ? "" : " ") + (number ? fmt::format("{}", *number) : word);
  }
  return has_any ? all : text;
}

struct ToText {
  std::string operator()(const std::string& value) const { return with_decimals(value); }
  std::string operator()(bool value) const { return value ? "true" : "false"; }
  template <class T>
  std::string operator()(const std::vector<T>& values) const {
    return fmt::format("[{}]", fmt::join(values, ", "));
  }
  template <class T>
  std::string operator()(T value) const {
    return fmt::format("{}", value);
  }
};

std::set<std::string> files_of(const StoredTensor& tensor) {
  std::set<std::string> files;
  for (const auto& part : tensor.parts) files.insert(part.file);
  return files;
}

int64_t total_bytes(const TensorFiles& files, const checkpoint::Selected& selected) {
  int64_t total = 0;
  for (const auto& [name, stored] : selected.tensors) total += bytes_of(files.tensors().at(stored));
  return total;
}

Json json_of(const TensorFiles& files, const checkpoint::Selected& selected) {
  Json json = {{"path", files.path()}, {"kind", files.kind()}};
  if (const auto* manifest = files.manifest()) {
    json["step"] = manifest->step;
    json["save"] = manifest->save;
    json["world"] = manifest->world;
    json["metrics"] = Json::object();
    for (const auto& [name, value] : manifest->metrics) json["metrics"][name] = ToJson()(value);
  }
  json["metadata"] = files.metadata();
  json["values"] = Json::object();
  for (const auto& [name, value] : files.values()) {
    json["values"][name] = std::visit(ToJson(), value);
  }
  json["files"] = files.files();
  json["tensors"] = Json::object();
  for (const auto& [name, stored] : selected.tensors) {
    const StoredTensor& tensor = files.tensors().at(stored);
    Json parts = Json::array();
    for (const auto& part : tensor.parts) {
      parts.push_back({{"file", part.file},
                       {"entry", part.entry},
                       {"offset", part.box.offset},
                       {"size", part.box.size}});
    }
    json["tensors"][name] = {{"dtype", tensor.dtype},
                             {"shape", tensor.sizes},
                             {"bytes", bytes_of(tensor)},
                             {"parts", parts}};
  }
  json["aliases"] = selected.aliases;
  return json;
}

void print_head(const TensorFiles& files) {
  fmt::print("{}: {}", files.path(), files.kind());
  int64_t bytes = 0;
  for (const auto& [name, count] : files.files()) bytes += count;
  if (const auto* manifest = files.manifest()) {
    fmt::print(" of step {}, save {}, by {}", manifest->step, manifest->save,
               counted(manifest->world, "rank"));
  }
  fmt::print(", {}, {}\n", counted(std::ssize(files.files()), "file"), text_of_bytes(bytes));
  if (const auto* manifest = files.manifest()) {
    for (const auto& [name, value] : manifest->metrics) {
      fmt::print("metric {} {}\n", printable(name), value);
    }
  }
}

void print_tensors(const TensorFiles& files, const checkpoint::Selected& selected) {
  size_t widest = 0, widest_type = 0;
  const auto type_of = [](const StoredTensor& tensor) {
    return fmt::format("{} [{}]", tensor.dtype, fmt::join(tensor.sizes, ", "));
  };
  for (const auto& [name, stored] : selected.tensors) {
    widest = std::max(widest, printable(name).size());
    widest_type = std::max(widest_type, type_of(files.tensors().at(stored)).size());
  }
  for (const auto& [name, stored] : selected.tensors) {
    const StoredTensor& tensor = files.tensors().at(stored);
    fmt::print("  {:{}}  {:{}}  {:>9}  {}\n", printable(name), widest, type_of(tensor), widest_type,
               text_of_bytes(bytes_of(tensor)), fmt::join(files_of(tensor), ", "));
  }
  for (const auto& [name, target] : selected.aliases) {
    fmt::print("  {:{}}  is {}\n", printable(name), widest, printable(target));
  }
  fmt::print("{}, {}\n", counted(std::ssize(selected.tensors), "tensor"),
             text_of_bytes(total_bytes(files, selected)));
}

void print_values(const TensorFiles& files) {
  if (!files.values().empty()) fmt::print("values\n");
  for (const auto& [name, value] : files.values()) {
    fmt::print("  {}  {}\n", printable(name), text_of(value));
  }
  if (!files.metadata().empty()) fmt::print("metadata\n");
  for (const auto& [name, value] : files.metadata()) {
    fmt::print("  {}  {}\n", printable(name), text_of(value));
  }
}

// What else a directory of checkpoints holds.
void print_others(const std::string& run) {
  const std::string path = checkpoint::checkpoints_of_run(run);
  if (!checkpoint::is_directory_of_checkpoints(path)) return;
  const auto listing = checkpoint::list_checkpoints(path);
  fmt::print("checkpoints in {}\n", path);
  for (const auto& one : listing.checkpoints) {
    fmt::print("  {}  step {}{}\n", one.name, one.step,
               &one == &listing.checkpoints.back() ? "  (the newest, shown above)" : "");
  }
  for (const auto& name : listing.unreadable) fmt::print("  {}  cannot be read\n", name);
}

// How many findings there are.
size_t print_findings(const std::string& name, const std::vector<std::string>& findings) {
  fmt::print("{}: {}\n", name,
             findings.empty() ? "whole" : "DAMAGED, " + counted(std::ssize(findings), "finding"));
  for (const auto& finding : findings) fmt::print("  {}\n", printable(finding));
  return findings.size();
}

}  // namespace

std::string printable(std::string_view text) {
  std::string shown;
  for (size_t i = 0; i < text.size();) {
    const auto [code, bytes] = text::character_at(text, i);
    if (code < 0x20 || code == 0x7f || code >= text::kInvalidByte) {
      shown += fmt::format("\\x{:02x}", static_cast<unsigned char>(text[i]));
    } else {
      shown += text.substr(i, bytes);
    }
    i += bytes;
  }
  return shown;
}

std::string text_of(const checkpoint::Value& value) {
  const std::string text = std::visit(ToText(), value);
  if (text.size() <= kLongestValue) return printable(text);
  size_t cut = kLongestValue;  // not inside of a character
  while (cut > 0 && (static_cast<unsigned char>(text[cut]) & 0xC0) == 0x80) --cut;
  return fmt::format("{}... ({} bytes)", printable(text.substr(0, cut)), text.size());
}

int inspect(const Inspection& inspection) {
  const bool is_trajectories = inspection.path.ends_with(".jsonl");
  if (is_trajectories && (inspection.json || !inspection.only.empty())) {
    throw ConfigError("[inspect] --json and --only are for checkpoints, not for trajectories");
  }
  if (!is_trajectories && inspection.episode != 0) {
    throw ConfigError("[inspect] --episode is for a trajectories.jsonl");
  }
  if (is_trajectories) {
    return inspect_trajectories(inspection.path, inspection.episode);
  }
  const auto files = checkpoint::open_tensors(inspection.path);
  const auto selected = select(*files, inspection.only);
  if (inspection.json) {
    fmt::print("{}\n",
               json_of(*files, selected).dump(1, ' ', false, Json::error_handler_t::replace));
    return 0;
  }
  print_head(*files);
  print_tensors(*files, selected);
  print_values(*files);
  print_others(inspection.path);
  return 0;
}

int verify(const std::string& run) {
  const std::string path = checkpoint::checkpoints_of_run(run);
  if (!checkpoint::is_directory_of_checkpoints(path)) {
    const auto files = checkpoint::open_tensors(path);
    return print_findings(files->path(), files->verify()) == 0 ? 0 : 1;
  }
  const auto found = checkpoint::verify_directory(path);
  size_t count = 0;
  for (const auto& [name, findings] : found.checkpoints) {
    count += print_findings(path + "/" + name, findings);
  }
  if (found.checkpoints.empty()) {
    fmt::print("{}: holds no published checkpoint\n", path);
    ++count;
  } else {
    count += print_findings(path + "/latest", found.directory);
  }
  for (const auto& name : found.unfinished) {
    fmt::print(
        "{}/{}: not whole: a save is under way, or did not end, and the next one removes it\n",
        path, name);
  }
  return count == 0 ? 0 : 1;
}

}  // namespace lockstep::tool
