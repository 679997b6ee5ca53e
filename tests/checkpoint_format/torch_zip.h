// Archives as torch.save writes them, made by hand.
#pragma once

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "checkpoint/format/torch_save/zip.h"

namespace lockstep::test {

using Records = std::vector<std::pair<std::string, std::string>>;  // names and bytes

inline std::string little_endian(uint64_t value, int count) {
  std::string bytes;
  for (int i = 0; i < count; ++i) bytes += static_cast<char>(value >> (8 * i));
  return bytes;
}

// A zip archive of records that are stored; `zip64`: with all numbers in zip64's fields.
inline std::string zip_of(const Records& records, bool zip64 = false) {
  std::string archive, directory;
  for (const auto& [name, bytes] : records) {
    const std::string crc = little_endian(checkpoint::crc32_of(bytes), 4);
    const std::string size = little_endian(zip64 ? 0xffffffff : bytes.size(), 4);
    std::string extra;
    if (zip64) {
      extra = little_endian(1, 2) + little_endian(24, 2) + little_endian(bytes.size(), 8) +
              little_endian(bytes.size(), 8) + little_endian(archive.size(), 8);
    }
    // Version, flags, method, time and date; what the record has.
    const std::string common = little_endian(45, 2) + std::string(8, '\0') + crc + size + size +
                               little_endian(name.size(), 2);
    directory += little_endian(0x02014b50, 4) + little_endian(45, 2) + common +
                 little_endian(extra.size(), 2) + std::string(10, '\0') +
                 little_endian(zip64 ? 0xffffffff : archive.size(), 4) + name + extra;
    archive += little_endian(0x04034b50, 4) + common + little_endian(0, 2) + name + bytes;
  }
  const size_t begin = archive.size(), count = records.size();
  archive += directory;
  if (zip64) {
    const size_t end64 = archive.size();
    archive += little_endian(0x06064b50, 4) + little_endian(44, 8) + std::string(12, '\0') +
               little_endian(count, 8) + little_endian(count, 8) +
               little_endian(directory.size(), 8) + little_endian(begin, 8);
    archive += little_endian(0x07064b50, 4) + little_endian(0, 4) + little_endian(end64, 8) +
               little_endian(1, 4);
  }
  const uint64_t many = zip64 ? 0xffff : count;
  return archive + little_endian(0x06054b50, 4) + little_endian(0, 4) + little_endian(many, 2) +
         little_endian(many, 2) + little_endian(zip64 ? 0xffffffff : directory.size(), 4) +
         little_endian(zip64 ? 0xffffffff : begin, 4) + little_endian(0, 2);
}

// Pieces of pickles.
inline std::string text(const std::string& value) {
  return "X" + little_endian(value.size(), 4) + value;
}
inline std::string global(const std::string& module, const std::string& name) {
  return "c" + module + "\n" + name + "\n";
}
inline std::string whole_number(int64_t value) {
  return "\x8a\x08" + little_endian(static_cast<uint64_t>(value), 8);
}
inline std::string tuple(const std::string& items) { return "(" + items + "t"; }
// Of float32 in the record data/0, which has 6 elements as the pickle says.
inline std::string tensor(const std::vector<int64_t>& sizes, const std::vector<int64_t>& strides,
                          int64_t offset = 0, const std::string& key = "0") {
  const auto numbers = [](const std::vector<int64_t>& values) {
    std::string items;
    for (const int64_t value : values) items += whole_number(value);
    return tuple(items);
  };
  const std::string storage = tuple(text("storage") + global("torch", "FloatStorage") + text(key) +
                                    text("cpu") + whole_number(6)) +
                              "Q";
  return global("torch._utils", "_rebuild_tensor_v2") +
         tuple(storage + whole_number(offset) + numbers(sizes) + numbers(strides) + "\x89" +
               global("collections", "OrderedDict") + ")R") +
         "R";
}
// {'a': VALUE}
inline std::string dict_of(const std::string& value) {
  return "\x80\x02}" + text("a") + value + "s.";
}

}  // namespace lockstep::test
