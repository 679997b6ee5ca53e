// tokenizer.json of Hugging Face's `tokenizers`, read and written.
#include <fmt/format.h>

#include <algorithm>
#include <nlohmann/json.hpp>
#include <string_view>
#include <unordered_map>
#include <unordered_set>
#include <utility>

#include "lockstep/core/error.h"
#include "lockstep/text/tokenizer.h"
#include "lockstep/text/utf8.h"
#include "text/parts.h"

namespace lockstep::text {
namespace {

using Json = nlohmann::json;
using Written = nlohmann::ordered_json;

class Reader {
 public:
  Reader(std::string_view json, std::string_view where) : where_(where) {
    if (depth(json) > kDeepest) fail("this is nested deeper than {}", kDeepest);
    whole_ = Json::parse(json, nullptr, false);
    if (whole_.is_discarded()) fail("this is not JSON");
    if (!whole_.is_object()) fail("this is not a JSON object");
  }

  Tokenizer::Parts::Model model() {
    Tokenizer::Parts::Model out;
    read_normalizer(out);
    read_words(out);
    check_decoder();
    read_added(out);
    read_model(out);
    out.post_processor = whole_.value("post_processor", Json()).dump();
    out.truncation = whole_.value("truncation", Json()).dump();
    out.padding = whole_.value("padding", Json()).dump();
    return out;
  }

 private:
  // Values are copied and destroyed by recursion.
  static constexpr int kDeepest = 32;
  static int depth(std::string_view json) {
    int now = 0, most = 0;
    bool quoted = false;
    for (size_t i = 0; i < json.size(); ++i) {
      const char c = json[i];
      if (quoted && c == '\\') ++i;
      if (c == '"') quoted = !quoted;
      if (!quoted && (c == '{' || c == '[')) most = std::max(most, ++now);
      if (!quoted && (c == '}' || c == ']')) --now;
    }
    return most;
  }

  template <class... Args>
  [[noreturn]] void fail(fmt::format_string<Args...> what, Args&&... args) const {
    throw DataError(
        fmt::format("[text] {}: {}", where_, fmt::format(what, std::forward<Args>(args)...)));
  }

  // The member, null when it is not there.
  static const Json& at(const Json& object, const char* name) {
    static const Json null;
    if (!object.is_object()) return null;
    const auto found = object.find(name);
    return found == object.end() ? null : *found;
  }
  static std::string type(const Json& object) {
    const Json& name = at(object, "type");
    return name.is_string() ? name.get<std::string>() : "";
  }
  static bool flag(const Json& object, const char* name, bool missing) {
    const Json& value = at(object, name);
    return value.is_boolean() ? value.get<bool>() : missing;
  }
  std::string text_of(const Json& value, std::string_view what) const {
    if (!value.is_string()) fail("{} is not a string", what);
    return value.get<std::string>();
  }
  int32_t number_of(const Json& value, std::string_view what) const {
    if (!value.is_number_integer() || value < 0 || value > INT32_MAX) {
      fail("{} is not the number of a token", what);
    }
    return value.get<int32_t>();
  }
  // A step, or the steps of a sequence.
  static std::vector<const Json*> steps(const Json& step, const char* members) {
    std::vector<const Json*> out;
    if (type(step) == "Sequence") {
      for (const Json& each : at(step, members)) out.push_back(&each);
    } else if (!step.is_null()) {
      out.push_back(&step);
    }
    return out;
  }

  void read_normalizer(Tokenizer::Parts::Model& out) const {
    for (const Json* step : steps(at(whole_, "normalizer"), "normalizers")) {
      if (type(*step) != "NFC") {
        fail("the normalizer '{}' is not known; NFC is", type(*step));
      }
      out.nfc = true;
    }
  }

  void read_words(Tokenizer::Parts::Model& out) const {
    bool split = false, bytes = false;
    for (const Json* step : steps(at(whole_, "pre_tokenizer"), "pretokenizers")) {
      if (type(*step) == "Split" && !split && !bytes) {
        const std::string expression =
            text_of(at(at(*step, "pattern"), "Regex"), "the pattern of pre_tokenizer");
        const auto pattern = pattern_of(expression);
        if (!pattern) {
          fail("the pattern '{}' is not known; those of Qwen, GPT-2, GPT-4 and Llama 3 are",
               expression);
        }
        if (at(*step, "behavior") != "Isolated" || flag(*step, "invert", false)) {
          fail(
              "the pre_tokenizer Split is not known with this behavior; Isolated, not inverted, "
              "is");
        }
        out.pattern = *pattern;
        split = true;
      } else if (type(*step) == "ByteLevel" && !bytes) {
        if (flag(*step, "add_prefix_space", true)) fail("add_prefix_space is not known");
        const bool own = flag(*step, "use_regex", true);
        if (own == split)
          fail("the pre_tokenizer needs one pattern: Split or ByteLevel's use_regex");
        if (own) out.pattern = Pattern::Gpt2;
        bytes = true;
      } else {
        fail("the pre_tokenizer '{}' is not known here; Split and then ByteLevel are", type(*step));
      }
    }
    if (!bytes) fail("the pre_tokenizer has no ByteLevel: this is not a byte-level BPE");
  }

  void check_decoder() const {
    if (type(at(whole_, "decoder")) != "ByteLevel") {
      fail("the decoder '{}' is not known; ByteLevel is", type(at(whole_, "decoder")));
    }
  }

  void read_added(Tokenizer::Parts::Model& out) const {
    const Json& added = at(whole_, "added_tokens");
    if (!added.is_array() && !added.is_null()) fail("added_tokens is not an array");
    for (const Json& token : added) {
      const std::string content = text_of(at(token, "content"), "the content of an added token");
      for (const char* name : {"single_word", "lstrip", "rstrip"}) {
        if (flag(token, name, false))
          fail("the added token '{}' has {}, which is not known", content, name);
      }
      out.added.push_back(
          {{content, flag(token, "special", false), flag(token, "normalized", false)},
           number_of(at(token, "id"), "the id of an added token")});
    }
  }

  void read_model(Tokenizer::Parts::Model& out) const {
    const Json& model = at(whole_, "model");
    if (type(model) != "BPE" &&
        !(model.is_object() && type(model).empty() && model.contains("merges"))) {
      fail("the model '{}' is not known; BPE is", type(model));
    }
    for (const char* name :
         {"dropout", "unk_token", "continuing_subword_prefix", "end_of_word_suffix"}) {
      const Json& value = at(model, name);
      if (!value.is_null() && value != "" && value != 0.0)
        fail("the model has {}, which is not known", name);
    }
    if (flag(model, "byte_fallback", false))
      fail("the model has byte_fallback, which is not known");
    out.whole_words = flag(model, "ignore_merges", false);
    const Json& vocabulary = at(model, "vocab");
    const Json& merges = at(model, "merges");
    if (!vocabulary.is_object()) fail("model.vocab is not an object");
    if (!merges.is_array()) fail("model.merges is not an array");
    const auto added = numbers_of_added(out, vocabulary);
    std::vector<std::pair<std::string, std::string>> pairs;
    pairs.reserve(merges.size());
    for (const Json& merge : merges) pairs.push_back(pair_of(merge));
    std::unordered_set<std::string> merged;  // of the added ones
    for (const auto& [left, right] : pairs) {
      for (const auto& part : {left, right, left + right}) {
        if (added.contains(part)) merged.insert(part);
      }
    }
    std::unordered_map<std::string, int32_t> ids;
    ids.reserve(vocabulary.size());
    out.vocabulary.reserve(vocabulary.size());
    for (const auto& [symbols, number] : vocabulary.items()) {
      const int32_t id = number_of(number, "a number in model.vocab");
      auto bytes = bytes_of_symbols(symbols);
      // Words have it, too, or it stands there as text.
      const bool is_of_words = bytes && (bytes->size() == 1 || merged.contains(symbols) ||
                                         (out.whole_words && valid_utf8(*bytes) == *bytes));
      if (added.contains(symbols) && bytes != symbols && !is_of_words) continue;
      if (!bytes)
        fail("'{}' in model.vocab is not made of the characters that stand for bytes", symbols);
      ids.emplace(*bytes, id);
      out.vocabulary.emplace_back(std::move(*bytes), id);
    }
    out.merges.reserve(pairs.size());
    for (const auto& [left, right] : pairs) out.merges.push_back(merge_of(left, right, ids));
  }

  // `tokenizers` gives an added token the number that its text has in model.vocab, else the next
  // one that is free: where the file says another, they and we would disagree.
  std::unordered_map<std::string_view, int32_t> numbers_of_added(
      const Tokenizer::Parts::Model& model, const Json& vocabulary) const {
    std::unordered_map<std::string_view, int32_t> numbers;
    auto next = static_cast<int64_t>(vocabulary.size());
    for (const auto& [token, id] : model.added) {
      if (const auto [same, is_new] = numbers.emplace(token.content, id); !is_new) {
        if (same->second == id) continue;
        fail("the added token '{}' has the numbers {} and {}", token.content, same->second, id);
      }
      const auto there = vocabulary.find(token.content);
      const int64_t theirs =
          there == vocabulary.end() ? next : number_of(*there, "a number in model.vocab");
      if (theirs != id) {
        fail(
            "the added token '{}' has the number {}; by model.vocab it would be {} in `tokenizers`",
            token.content, id, theirs);
      }
      next = std::max<int64_t>(next, id + int64_t{1});
    }
    return numbers;
  }

  std::pair<std::string, std::string> pair_of(const Json& merge) const {
    if (merge.is_string()) {  // "a b", as files were written up to 2024
      const auto& both = merge.get_ref<const std::string&>();
      const size_t space = both.find(' ');
      if (space == both.npos) fail("'{}' in model.merges is not a pair", both);
      return {both.substr(0, space), both.substr(space + 1)};
    }
    if (!merge.is_array() || merge.size() != 2) fail("an entry of model.merges is not a pair");
    return {text_of(merge[0], "a part in model.merges"),
            text_of(merge[1], "a part in model.merges")};
  }

  Merge merge_of(const std::string& left, const std::string& right,
                 const std::unordered_map<std::string, int32_t>& ids) const {
    const auto id = [&](const std::string& symbols) {
      const auto bytes = bytes_of_symbols(symbols);
      const auto found = bytes ? ids.find(*bytes) : ids.end();
      if (found == ids.end()) fail("'{}' of model.merges is not in model.vocab", symbols);
      return found->second;
    };
    return {id(left), id(right), id(left + right)};
  }

  std::string where_;
  Json whole_;
};

}  // namespace

Tokenizer Tokenizer::from_json(std::string_view json, std::string_view where) {
  return Tokenizer(std::make_shared<const Parts>(Reader(json, where).model(), where));
}

std::string Tokenizer::to_json() const {
  const auto& model = parts_->model;
  auto added = Written::array();
  for (const auto& [token, id] : model.added) {
    added.push_back({{"id", id},
                     {"content", token.content},
                     {"single_word", false},
                     {"lstrip", false},
                     {"rstrip", false},
                     {"normalized", token.normalized},
                     {"special", token.special}});
  }
  std::vector<std::string> symbols(parts_->bytes.size());
  for (const auto& [bytes, id] : model.vocabulary)
    symbols[static_cast<size_t>(id)] = Json(symbols_of_bytes(bytes)).dump();
  // Added tokens that model.vocab does not have `tokenizers` numbers itself, one after another.
  std::vector<std::string> vocabulary = symbols;
  size_t next = model.vocabulary.size();
  bool in_order = true;
  for (const auto& [token, id] : model.added) {
    const auto i = static_cast<size_t>(id);
    const std::string shown = Json(token.content).dump();
    const auto bytes = bytes_of_symbols(token.content);
    const auto other = bytes ? parts_->ids.find(*bytes) : parts_->ids.end();
    if (other != parts_->ids.end() && other->second != id &&
        symbols[static_cast<size_t>(other->second)] == shown) {
      throw DataError(
          fmt::format("[text] to_json: the added token '{}' is {} and would be {} in `tokenizers`, "
                      "where its characters are bytes: give it another text",
                      token.content, id, other->second));
    }
    in_order = in_order && (vocabulary[i].empty() ? i == next++ : i < model.vocabulary.size());
    if (vocabulary[i].empty()) vocabulary[i] = shown;
  }
  std::string vocab = "{";
  for (size_t id = 0; id < symbols.size(); ++id) {
    const std::string& text = (in_order ? symbols : vocabulary)[id];
    if (!text.empty())
      vocab += fmt::format("{}\n      {}: {}", vocab.size() == 1 ? "" : ",", text, id);
  }
  vocab += "\n    }";
  std::string merges = "[";
  for (const auto& merge : model.merges) {
    merges += fmt::format("{}\n      [{}, {}]", merges.size() == 1 ? "" : ",",
                          symbols[static_cast<size_t>(merge.left)],
                          symbols[static_cast<size_t>(merge.right)]);
  }
  merges += model.merges.empty() ? "]" : "\n    ]";
  const bool own = model.pattern == Pattern::Gpt2;
  const Written bytes = {{"type", "ByteLevel"},
                         {"add_prefix_space", false},
                         {"trim_offsets", false},
                         {"use_regex", own}};
  const Written words = own ? bytes
                            : Written{{"type", "Sequence"},
                                      {"pretokenizers",
                                       {{{"type", "Split"},
                                         {"pattern", {{"Regex", expression_of(model.pattern)}}},
                                         {"behavior", "Isolated"},
                                         {"invert", false}},
                                        bytes}}};
  const Written decoder = {{"type", "ByteLevel"},
                           {"add_prefix_space", true},
                           {"trim_offsets", true},
                           {"use_regex", true}};
  return fmt::format(R"({{
  "version": "1.0",
  "truncation": {},
  "padding": {},
  "added_tokens": {},
  "normalizer": {},
  "pre_tokenizer": {},
  "post_processor": {},
  "decoder": {},
  "model": {{
    "type": "BPE",
    "dropout": null,
    "unk_token": null,
    "continuing_subword_prefix": null,
    "end_of_word_suffix": null,
    "fuse_unk": false,
    "byte_fallback": false,
    "ignore_merges": {},
    "vocab": {},
    "merges": {}
  }}
}}
)",
                     model.truncation, model.padding, added.dump(2),
                     model.nfc ? R"({"type": "NFC"})" : "null", words.dump(2), model.post_processor,
                     decoder.dump(2), model.whole_words, vocab, merges);
}

}  // namespace lockstep::text
