// Any bytes as a tokenizer.json, as a .tiktoken file and as text: a tokenizer or a DataError, and
// what is encoded comes back.
#include <unistd.h>

#include <cstdlib>
#include <string>
#include <string_view>

#include "lockstep/core/error.h"
#include "lockstep/text/tokenizer.h"
#include "lockstep/text/tokenizer_trainer.h"
#include "text/files.h"
#include "text/unicode.h"

namespace {

using namespace lockstep;

void check(const Tokenizer& tokenizer, std::string_view text) {
  const auto ids = tokenizer.encode(text);
  const std::string back = tokenizer.decode(ids);
  TextStream stream(tokenizer);
  std::string pieces;
  for (const int32_t id : ids) pieces += stream.add(id);
  if (pieces + stream.finish() != back) std::abort();
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* bytes, size_t count) {
  static const Tokenizer own = text::train_tokenizer(
      {"the cat and the other cats at \u00e9t\u00e9 \u6587\u5b57"},
      {.vocabulary = 300, .min_frequency = 1, .added = {{"<|a|>"}, {"<b>", false, true}}});
  static const std::string path = "/tmp/tokenizer_fuzz." + std::to_string(getpid()) + ".tiktoken";
  const std::string_view text(reinterpret_cast<const char*>(bytes), count);
  check(own, text);
  if (text.find('<') == text.npos) {
    const std::string normal = text::to_nfc(text);
    if (own.decode(own.encode(text)) != normal || text::to_nfc(normal) != normal) std::abort();
  }
  try {
    const auto read = Tokenizer::from_json(text);
    check(read, text);
    if (Tokenizer::from_json(read.to_json()).to_json() != read.to_json()) std::abort();
  } catch (const DataError&) {
  }
  text::write_file(path, text);
  try {
    check(Tokenizer::from_file(path), text);
  } catch (const DataError&) {
  }
  unlink(path.c_str());
  return 0;
}
