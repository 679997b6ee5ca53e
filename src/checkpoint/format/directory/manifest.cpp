#include "lockstep/checkpoint/manifest.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <optional>

#include "checkpoint/format/checksum.h"
#include "checkpoint/format/json.h"
#include "lockstep/checkpoint/error.h"
#include "lockstep/checkpoint/safetensors.h"

namespace lockstep::checkpoint {
namespace {

constexpr char kFormat[] = "lockstep-checkpoint";
constexpr std::string_view kBegin = "{\"xxh3\": \"", kNoChecksum = "0000000000000000";
// What comes after the head, as to_json() writes it; in JSON no text has a line's end.
constexpr std::string_view kAfterHead = ",\n \"values\": {";
constexpr int64_t kMost = int64_t{1} << 62;

// JSON has no infinities: they are texts in an object of their own.
Json json_of(double value) {
  if (std::isfinite(value)) return value;
  return {{"float", std::isnan(value) ? "nan" : value > 0 ? "inf" : "-inf"}};
}

struct ToJson {
  Json operator()(double value) const { return json_of(value); }
  Json operator()(const std::vector<double>& values) const {
    Json list = Json::array();
    for (const double value : values) list.push_back(json_of(value));
    return list;
  }
  template <class T>
  Json operator()(const T& value) const {
    return value;
  }
};

std::string in_json(const std::string& text) {
  const auto is_plain = [](char c) { return c >= 0x20 && c < 0x7f && c != '"' && c != '\\'; };
  return std::ranges::all_of(text, is_plain) ? '"' + text + '"' : Json(text).dump();
}

// `line` begins the line of the last bracket.
std::string in_json(const Sizes& sizes, std::string_view line) {
  if (sizes.empty()) return "[]";
  return fmt::format("[{} {}{}]", line, fmt::join(sizes, fmt::format(",{} ", line)), line);
}

// The tensors' part of the file, laid out as the rest. A tree of JSON values for thousands of
// tensors takes more time than writing them does.
std::string in_json(const std::map<std::string, ManifestTensor>& tensors) {
  std::string text = "{";
  for (const auto& [name, tensor] : tensors) {
    text += fmt::format("{}\n  {}: {{\n   \"dtype\": {},\n   \"shape\": {},\n   \"boxes\": [",
                        text.size() > 1 ? "," : "", in_json(name), in_json(tensor.dtype),
                        in_json(tensor.sizes, "\n   "));
    for (const auto& box : tensor.boxes) {
      text += fmt::format(
          "{}\n    {{\n     \"file\": {},\n     \"entry\": {},\n     \"offset\": {},\n"
          "     \"size\": {},\n     \"xxh3\": \"{}\"\n    }}",
          text.back() == '[' ? "" : ",", in_json(box.file), in_json(box.entry),
          in_json(box.box.offset, "\n     "), in_json(box.box.size, "\n     "), hex(box.checksum));
    }
    text += tensor.boxes.empty() ? "]\n  }" : "\n   ]\n  }";
  }
  return text + (tensors.empty() ? "}" : "\n }");
}

// Reads a parsed manifest; every complaint has the file and the place in it.
class Parser {
 public:
  explicit Parser(std::string_view where) : where_(where) {}

  std::string_view where() const { return where_; }

  [[noreturn]] void complain(const std::string& text) const {
    throw CheckpointError(fmt::format("{}: {}", where_, text));
  }

  const Json& member(const Json& json, const char* key, Json::value_t type,
                     const std::string& of) const {
    const bool is = json.is_object() && json.contains(key) && json[key].type() == type;
    if (!is) complain(fmt::format("{} has no {}, or of another type", of, key));
    return json[key];
  }

  int64_t count(const Json& json, const std::string& what) const {
    if (!json.is_number_integer() || (json.is_number_unsigned() && json.get<uint64_t>() > kMost) ||
        json.get<int64_t>() < 0) {
      complain(what + " is not a whole number from 0 to 2^62");
    }
    return json.get<int64_t>();
  }

  Sizes sizes(const Json& json, const std::string& what) const {
    Sizes sizes;
    int64_t product = 16;  // bytes of the widest element
    for (const auto& size : json) {
      sizes.push_back(count(size, what));
      if (__builtin_mul_overflow(product, sizes.back(), &product)) {
        complain(what + " gives more bytes than 64 bits count");
      }
    }
    if (sizes.size() > 64) complain(what + " has more than 64 dimensions");
    return sizes;
  }

  uint64_t sum(const Json& json, const std::string& what) const {
    const auto value = from_hex(json.get<std::string>());
    if (!value) complain(what + " has a checksum that is not 16 hexadecimal digits");
    return *value;
  }

  double real(const Json& json, const std::string& what) const {
    if (json.is_number()) return json.get<double>();
    if (json.is_object() && json.size() == 1 && json.contains("float") &&
        json["float"].is_string()) {
      const auto text = json["float"].get<std::string>();
      if (text == "inf") return std::numeric_limits<double>::infinity();
      if (text == "-inf") return -std::numeric_limits<double>::infinity();
      if (text == "nan") return std::numeric_limits<double>::quiet_NaN();
    }
    complain(what + " is not a number");
  }

  Value value(const Json& json, const std::string& what) const {
    if (json.is_boolean()) return json.get<bool>();
    if (json.is_string()) return json.get<std::string>();
    if (json.is_number_integer()) return whole_number(json, what);
    if (!json.is_array()) return real(json, what);
    std::vector<int64_t> integers;
    std::vector<double> reals;
    for (const auto& item : json) {
      if (item.is_number_integer()) {
        integers.push_back(whole_number(item, what));
      } else {
        reals.push_back(real(item, what));
      }
    }
    if (!integers.empty() && !reals.empty()) complain(what + " mixes whole and real numbers");
    if (!reals.empty()) return reals;
    return integers;
  }

  ManifestTensor tensor(const Json& json, const std::string& name,
                        const std::map<std::string, ManifestFile>& files) const {
    ManifestTensor tensor{
        member(json, "dtype", Json::value_t::string, name).get<std::string>(),
        sizes(member(json, "shape", Json::value_t::array, name), "the shape of " + name),
        {}};
    if (tensor.dtype != "C64" && tensor.dtype != "C128" && !Dtype::named(tensor.dtype)) {
      complain(fmt::format("{} has the unknown dtype {}", name, in_quotes(tensor.dtype)));
    }
    std::vector<Box> boxes;
    for (const auto& part : member(json, "boxes", Json::value_t::array, name)) {
      using Type = Json::value_t;
      const auto list = [&](const char* key) {
        return sizes(member(part, key, Type::array, "a box of " + name), "a box of " + name);
      };
      ManifestBox box{{list("offset"), list("size")},
                      member(part, "file", Type::string, name).get<std::string>(),
                      member(part, "entry", Type::string, name).get<std::string>(),
                      sum(member(part, "xxh3", Type::string, name), name)};
      if (!files.contains(box.file)) {
        complain(fmt::format("{} is in file {}, which is not listed", name, in_quotes(box.file)));
      }
      boxes.push_back(box.box);
      tensor.boxes.push_back(std::move(box));
    }
    if (const auto fault = fault_of(tensor.sizes, boxes); !fault.empty()) {
      complain(fmt::format("the boxes of {} do not cover it once: {}", name, fault));
    }
    return tensor;
  }

 private:
  int64_t whole_number(const Json& json, const std::string& what) const {
    if (json.is_number_unsigned() &&
        json.get<uint64_t>() > uint64_t{std::numeric_limits<int64_t>::max()}) {
      complain(what + " does not fit into 64 bits");
    }
    return json.get<int64_t>();
  }

  std::string_view where_;
};

// A name of a file beside the manifest, and not the manifest.
bool is_plain_name(const std::string& name) {
  return !name.empty() && name.front() != '.' && name.find('/') == std::string::npos &&
         name.find('\0') == std::string::npos && name != "manifest.json";
}

const Json& part_of(const Json& json, const char* key, const Parser& parser) {
  return parser.member(json, key, Json::value_t::object, "the manifest");
}

Manifest head_of(const Json& json, const Parser& parser) {
  const auto count = [&](const char* key) {
    if (!json.contains(key)) parser.complain(fmt::format("the manifest has no {}", key));
    return parser.count(json[key], key);
  };
  Manifest manifest{.step = count("step"), .save = count("save"), .world = count("world")};
  for (const auto& [name, value] : part_of(json, "metrics", parser).items()) {
    manifest.metrics[name] = parser.real(value, "the metric " + in_quotes(name));
  }
  return manifest;
}

Manifest whole_of(const Json& json, const Parser& parser) {
  using Type = Json::value_t;
  Manifest manifest = head_of(json, parser);
  const auto part = [&](const char* key) -> const Json& { return part_of(json, key, parser); };
  for (const auto& [name, value] : part("values").items()) {
    manifest.values[name] = parser.value(value, "the value " + in_quotes(name));
  }
  for (const auto& [name, file] : part("files").items()) {
    if (!is_plain_name(name)) parser.complain("it names a file " + in_quotes(name));
    if (!file.is_object() || !file.contains("bytes")) {
      parser.complain(fmt::format("file {} has no bytes", in_quotes(name)));
    }
    manifest.files[name] = {
        parser.count(file["bytes"], "the bytes of " + in_quotes(name)),
        parser.sum(parser.member(file, "xxh3", Type::string, in_quotes(name)), in_quotes(name))};
  }
  for (const auto& [name, tensor] : part("tensors").items()) {
    manifest.tensors[name] = parser.tensor(tensor, "tensor " + in_quotes(name), manifest.files);
  }
  for (const auto& [name, target] : part("aliases").items()) {
    if (!target.is_string() || !manifest.tensors.contains(target.get<std::string>()) ||
        manifest.tensors.contains(name)) {
      parser.complain(fmt::format("{} is another name of nothing, or a tensor", in_quotes(name)));
    }
    manifest.aliases[name] = target.get<std::string>();
  }
  return manifest;
}

std::string with_checksum(std::string text) {
  text.replace(kBegin.size(), kNoChecksum.size(), hex(checksum(text)));
  return text;
}

bool is_whole(std::string_view text) {
  if (!text.starts_with(kBegin) || text.size() < kBegin.size() + kNoChecksum.size()) return false;
  std::string zeroed(text);
  zeroed.replace(kBegin.size(), kNoChecksum.size(), kNoChecksum);
  return with_checksum(std::move(zeroed)) == text;
}

// The parsed text of a file that is `whole`, of this format and version.
Json checked(std::string_view text, bool whole, const Parser& parser) {
  std::optional<Json> json;
  try {
    json = parse_json(text, parser.where(), 8);
  } catch (const CheckpointError&) {
    if (whole) throw;
  }
  if (json && json->is_object() && json->contains("version") &&
      (*json)["version"] != kManifestVersion && (*json)["version"].is_number_integer() &&
      (whole || !text.starts_with(kBegin))) {
    parser.complain(
        fmt::format("is of version {}, and this program reads version {}: use the "
                    "Lockstep that wrote it, or a newer one",
                    (*json)["version"].dump(), kManifestVersion));
  }
  if (!whole) {
    parser.complain(
        "is damaged: it does not have the checksum in its first line. Restore another "
        "checkpoint, or copy it again");
  }
  if (!json->is_object() || json->value("format", "") != kFormat) {
    parser.complain(fmt::format("its format is not {}", kFormat));
  }
  return std::move(*json);
}

}  // namespace

std::string to_json(const Manifest& manifest) {
  nlohmann::ordered_json json;
  json["format"] = kFormat;
  json["version"] = kManifestVersion;
  json["step"] = manifest.step;
  json["save"] = manifest.save;
  json["world"] = manifest.world;
  const auto object = [&](const char* key) -> nlohmann::ordered_json& {
    return json[key] = nlohmann::ordered_json::object();
  };
  auto& metrics = object("metrics");
  for (const auto& [name, value] : manifest.metrics) metrics[name] = json_of(value);
  auto& values = object("values");
  // operator[] would look through all that are there.
  const auto put = [](nlohmann::ordered_json& to, const std::string& name,
                      nlohmann::ordered_json value) {
    to.get_ref<nlohmann::ordered_json::object_t&>().emplace_back(name, std::move(value));
  };
  for (const auto& [name, value] : manifest.values) put(values, name, std::visit(ToJson(), value));
  auto& aliases = object("aliases");
  for (const auto& [name, target] : manifest.aliases) put(aliases, name, target);
  auto& files = object("files");
  for (const auto& [name, file] : manifest.files) {
    files[name] = {{"bytes", file.bytes}, {"xxh3", hex(file.checksum)}};
  }
  try {
    std::string head = json.dump(1).substr(2);
    head.resize(head.size() - 2);  // the line of the last brace
    return with_checksum(fmt::format("{}{}\",\n{},\n \"tensors\": {}\n}}\n", kBegin, kNoChecksum,
                                     head, in_json(manifest.tensors)));
  } catch (const Json::exception& error) {
    throw CheckpointError(
        fmt::format("[checkpoint] a name or value is not UTF-8: {}", in_quotes(error.what())));
  }
}

Manifest manifest_from(std::string_view text, std::string_view where) {
  const Parser parser(where);
  return whole_of(checked(text, is_whole(text), parser), parser);
}

Manifest manifest_head_from(std::string_view text, std::string_view where) {
  const Parser parser(where);
  const bool whole = is_whole(text);
  const size_t end = whole ? text.find(kAfterHead) : std::string_view::npos;
  if (end == std::string_view::npos) return manifest_from(text, where);
  return head_of(checked(std::string(text.substr(0, end)) + "}", whole, parser), parser);
}

}  // namespace lockstep::checkpoint
