// The secret of a job, and what is proved and derived with it.
#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <string_view>

namespace lockstep::launch {

using Digest = std::array<uint8_t, 32>;

// HMAC-SHA256 of the texts' concatenation, each after its length: no two lists give the same input.
Digest hmac(std::string_view key, std::initializer_list<std::string_view> texts);

inline std::string_view text_of(const Digest& digest) {
  return {reinterpret_cast<const char*>(digest.data()), digest.size()};
}

// In a time that does not depend on where they differ.
bool is_same(std::string_view a, std::string_view b);

Digest random_bytes();

// What every launcher of a job has been given, and nobody else. Not printable by accident: there is
// no way to get it out.
class Token {
 public:
  // Throws ConfigError for fewer than 16 bytes.
  explicit Token(std::string_view secret);
  // From LOCKSTEP_TOKEN, or the file that LOCKSTEP_TOKEN_FILE names, without white space at its
  // end. Throws ConfigError that says how to make one when neither is there; when both are; and
  // when others than its owner may read the file.
  static Token from_env();

  // A key for one purpose; the same token gives other jobs (`run_id`) other keys.
  Digest key(std::string_view purpose, std::string_view run_id) const;

 private:
  std::string secret_;
};

}  // namespace lockstep::launch
