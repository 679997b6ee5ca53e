// XXH3-64 (https://github.com/Cyan4973/xxHash): what `xxhsum -H3` prints.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>

namespace lockstep::checkpoint {

uint64_t checksum(std::string_view bytes);

// Of bytes that come in pieces.
class Checksum {
 public:
  Checksum();
  ~Checksum();
  void add(std::string_view bytes);
  uint64_t value() const;

 private:
  struct State;
  std::unique_ptr<State> state_;
};

// 16 hexadecimal digits, lower case; and back, nothing for any other text.
std::string hex(uint64_t value);
std::optional<uint64_t> from_hex(std::string_view text);

}  // namespace lockstep::checkpoint
