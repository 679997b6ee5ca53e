#include "checkpoint/format/json.h"

#include <fmt/format.h>

#include <algorithm>
#include <set>
#include <vector>

#include "lockstep/checkpoint/error.h"

namespace lockstep::checkpoint {

namespace {

// Looks for what Json::parse() lets pass. Its own callback for that takes time that grows with the
// square of an object's members: 0.8 s for 10,000.
class Check : public nlohmann::json_sax<Json> {
 public:
  Check(std::string_view where, int depth) : where_(where), depth_(depth) {}

  bool null() override { return look(); }
  bool boolean(bool) override { return look(); }
  bool number_integer(number_integer_t) override { return look(); }
  bool number_unsigned(number_unsigned_t) override { return look(); }
  bool number_float(number_float_t, const string_t&) override { return look(); }
  bool string(string_t&) override { return look(); }
  bool binary(binary_t&) override { return look(); }
  bool start_object(size_t) override { return open(); }
  bool end_object() override { return close(); }
  bool start_array(size_t) override { return open(); }
  bool end_array() override { return close(); }
  bool key(string_t& name) override {
    if (!keys_.back().insert(name).second) {
      throw CheckpointError(fmt::format("{}: {} comes twice", where_, in_quotes(name)));
    }
    return look();
  }
  bool parse_error(size_t, const std::string&, const Json::exception& error) override {
    throw CheckpointError(fmt::format("{}: is not JSON: {}", where_, in_quotes(error.what())));
  }

 private:
  bool look() const {
    if (keys_.size() <= static_cast<size_t>(depth_)) return true;
    throw CheckpointError(fmt::format("{}: JSON nested deeper than {} levels", where_, depth_));
  }
  bool open() {
    look();
    keys_.emplace_back();
    return true;
  }
  bool close() {
    keys_.pop_back();
    return true;
  }

  std::string_view where_;
  int depth_;
  std::vector<std::set<std::string>> keys_;  // of the objects and lists around
};

}  // namespace

Json parse_json(std::string_view text, std::string_view where, int depth) {
  Check check(where, depth);
  Json::sax_parse(text.begin(), text.end(), &check);
  return Json::parse(text.begin(), text.end());
}

std::string in_quotes(std::string_view text) {
  size_t cut = std::min<size_t>(text.size(), 200);  // not within a character
  while (cut > 0 && cut < text.size() && (text[cut] & 0xC0) == 0x80) --cut;
  const std::string_view part = text.substr(0, cut);
  bool is_utf8 = std::ranges::all_of(part, [](char c) { return (c & 0x80) == 0; });
  if (!is_utf8) {
    const auto as_json = Json(part).dump(-1, ' ', false, Json::error_handler_t::replace);
    is_utf8 = Json::parse(as_json).get<std::string>() == part;
  }
  std::string shown = "'";
  for (const char c : part) {
    const auto code = static_cast<unsigned char>(c);
    // A terminal may take bytes that are no text for commands.
    if (code < 0x20 || code == 0x7f || (code >= 0x80 && !is_utf8)) {
      shown += fmt::format("\\x{:02x}", code);
    } else {
      shown += c;
    }
  }
  return shown + (cut < text.size() ? "...'" : "'");
}

}  // namespace lockstep::checkpoint
