// The secret of a job, proofs of knowing it, and keys derived from it.
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

namespace lockstep {

using Digest = std::array<uint8_t, 32>;

// HMAC-SHA256 of the texts' concatenation, each after its length: no two lists give the same input.
Digest hmac(std::string_view key, std::initializer_list<std::string_view> texts);

inline std::string_view text_of(const Digest& digest) {
  return {reinterpret_cast<const char*>(digest.data()), digest.size()};
}

// In a time that does not depend on where they differ.
bool is_same(std::string_view a, std::string_view b);

Digest random_bytes();

// The secret that every launcher of a job has been given. Not printable by accident: there is no
// way to get it out.
class Token {
 public:
  // Without white space at its end, which a file's last line has, and a variable may have that was
  // set from one. Throws ConfigError for fewer than 16 bytes.
  explicit Token(std::string_view secret);
  // From LOCKSTEP_TOKEN, or the file that LOCKSTEP_TOKEN_FILE names. Throws ConfigError that says
  // how to make one when neither is there; when both are; and when others than its owner may read
  // the file.
  static Token from_env();

  // A key for one purpose; the same token gives other jobs (`run_id`) other keys.
  Digest key(std::string_view purpose, std::string_view run_id) const;

 private:
  std::string secret_;
};

// 64 hexadecimal digits, and back; nothing for any other text.
std::string hex_of(const Digest& digest);
std::optional<Digest> digest_of_hex(std::string_view text);

// The variable in which `lockstep run` gives the ranks of a job their secret. It is not the token:
// it follows from that, or is random, and opens nothing but the ranks' own connections.
constexpr const char* kJobKeyVariable = "LOCKSTEP_JOB_KEY";

// The secret that only the ranks of a job know: what kJobKeyVariable says, else what follows from
// the job's token (Token::from_env) and `job`; nothing where there is neither. Throws ConfigError,
// as Token does.
std::optional<Digest> job_key_from_env(std::string_view job);

}  // namespace lockstep
