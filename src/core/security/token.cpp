#include "core/security/token.h"

#include <fmt/format.h>
#include <openssl/crypto.h>
#include <openssl/evp.h>
#include <openssl/hmac.h>
#include <sys/random.h>
#include <sys/stat.h>

#include <cerrno>
#include <charconv>
#include <cstring>

#include "core/files/read_file.h"
#include "core/security/openssl.h"
#include "lockstep/core/environment.h"
#include "lockstep/core/error.h"

namespace lockstep {
namespace {

constexpr size_t kFewest = 16;

constexpr const char* kHow =
    "the launchers of a job on several hosts prove to each other that they belong to it. Make a "
    "secret once (openssl rand -hex 32 > job.token; chmod 600 job.token), copy it to every host, "
    "and set LOCKSTEP_TOKEN_FILE to its path there, or LOCKSTEP_TOKEN to the secret itself";

std::string read_secret(const std::string& path) {
  const std::string about = "[token] LOCKSTEP_TOKEN_FILE=" + path;
  std::string secret = read_file(path, about);
  struct stat status;
  if (stat(path.c_str(), &status) != 0) {
    throw ConfigError(fmt::format("{}: {}", about, std::strerror(errno)));
  }
  const bool is_read = (status.st_mode & (S_IRGRP | S_IROTH)) != 0;
  const bool is_written = (status.st_mode & (S_IWGRP | S_IWOTH)) != 0;
  if ((is_read || is_written) && S_ISREG(status.st_mode)) {
    throw ConfigError(fmt::format("{}: others may {} it (mode {:04o}): chmod 600 {}", about,
                                  is_read ? "read" : "replace", status.st_mode & 0777, path));
  }
  return secret;
}

}  // namespace

Digest hmac(std::string_view key, std::initializer_list<std::string_view> texts) {
  std::string input;
  for (const std::string_view text : texts) {
    const auto length = static_cast<uint32_t>(text.size());
    for (int shift = 24; shift >= 0; shift -= 8) input += static_cast<char>(length >> shift);
    input += text;
  }
  keep_openssl();
  Digest digest;
  unsigned size = 0;
  const auto* result = HMAC(EVP_sha256(), key.data(), static_cast<int>(key.size()),
                            reinterpret_cast<const unsigned char*>(input.data()), input.size(),
                            digest.data(), &size);
  if (result == nullptr || size != digest.size()) throw Error("[token] no HMAC-SHA256 in OpenSSL");
  return digest;
}

bool is_same(std::string_view a, std::string_view b) {
  return a.size() == b.size() && CRYPTO_memcmp(a.data(), b.data(), a.size()) == 0;
}

Digest random_bytes() {
  Digest bytes;
  // At most 256 bytes never come short.
  if (getrandom(bytes.data(), bytes.size(), 0) != static_cast<ssize_t>(bytes.size())) {
    throw Error(fmt::format("[token] getrandom: {}", std::strerror(errno)));
  }
  return bytes;
}

Token::Token(std::string_view secret)
    : secret_(secret.substr(0, secret.find_last_not_of(" \t\r\n") + 1)) {
  if (!secret.empty() && secret_.empty()) {
    throw ConfigError(fmt::format(
        "[token] the job's token is nothing but {} bytes of white space; {}", secret.size(), kHow));
  }
  if (secret_.size() < kFewest) {
    throw ConfigError(
        fmt::format("[token] the job's token has {} bytes, too few to be a secret: "
                    "need {} at least; {}",
                    secret_.size(), kFewest, kHow));
  }
}

Token Token::from_env() {
  const auto secret = env_text("LOCKSTEP_TOKEN"), path = env_text("LOCKSTEP_TOKEN_FILE");
  if (secret && path) {
    throw ConfigError("[token] both LOCKSTEP_TOKEN and LOCKSTEP_TOKEN_FILE are set: unset one");
  }
  if (!secret && !path) throw ConfigError(fmt::format("[token] no LOCKSTEP_TOKEN_FILE: {}", kHow));
  return Token(secret ? *secret : read_secret(*path));
}

Digest Token::key(std::string_view purpose, std::string_view run_id) const {
  return hmac(secret_, {"lockstep rendezvous", purpose, run_id});
}

std::string hex_of(const Digest& digest) {
  std::string text;
  for (const uint8_t byte : digest) text += fmt::format("{:02x}", byte);
  return text;
}

std::optional<Digest> digest_of_hex(std::string_view text) {
  Digest digest;
  if (text.size() != 2 * digest.size()) return std::nullopt;
  for (size_t i = 0; i < digest.size(); ++i) {
    const char* const begin = text.data() + 2 * i;
    const auto [stop, status] = std::from_chars(begin, begin + 2, digest[i], 16);
    if (status != std::errc() || stop != begin + 2) return std::nullopt;
  }
  return digest;
}

std::optional<Digest> job_key_from_env(std::string_view job) {
  if (const auto text = env_text(kJobKeyVariable)) {
    const auto key = digest_of_hex(*text);
    if (!key) {
      // Not quoted: it may be a secret with one digit too many.
      throw ConfigError(fmt::format(
          "[token] {} has {} characters where {} hexadecimal digits are due: leave it to "
          "the launcher",
          kJobKeyVariable, text->size(), 2 * Digest().size()));
    }
    return key;
  }
  if (!env_text("LOCKSTEP_TOKEN") && !env_text("LOCKSTEP_TOKEN_FILE")) return std::nullopt;
  return Token::from_env().key("ranks", job);
}

}  // namespace lockstep
