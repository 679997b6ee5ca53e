#include "core/hash/sha256.h"

#include <fmt/format.h>
#include <openssl/sha.h>

#include <array>

#include "core/security/openssl.h"

namespace lockstep {

std::string sha256(std::string_view bytes) {
  keep_openssl();
  std::array<unsigned char, SHA256_DIGEST_LENGTH> digest;
  SHA256(reinterpret_cast<const unsigned char*>(bytes.data()), bytes.size(), digest.data());
  std::string text;
  for (const auto byte : digest) text += fmt::format("{:02x}", byte);
  return text;
}

}  // namespace lockstep
