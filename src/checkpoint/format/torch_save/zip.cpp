#include "checkpoint/format/torch_save/zip.h"

#include <fmt/format.h>
#include <zlib.h>

#include <algorithm>
#include <vector>

#include "checkpoint/format/json.h"
#include "lockstep/checkpoint/error.h"

namespace lockstep::checkpoint {
namespace {

// What ends an archive, with zip64's before it.
constexpr uint32_t kEnd = 0x06054b50, kEnd64 = 0x06064b50, kLocator64 = 0x07064b50;
constexpr uint32_t kEntry = 0x02014b50, kLocal = 0x04034b50;
constexpr uint64_t kEndBytes = 22, kEnd64Bytes = 56, kLocatorBytes = 20;
constexpr uint64_t kEntryBytes = 46, kLocalBytes = 30, kMostComment = 65535;
constexpr uint32_t kIn64 = 0xffffffff;  // the number is in zip64's field
constexpr uint16_t kField64 = 1, kEncrypted = 1, kStored = 0;

class Parser {
 public:
  Parser(std::string_view archive, std::string_view where) : bytes_(archive), where_(where) {}

  std::map<std::string, ZipRecord> parse() {
    const auto [begin, count, end] = directory();
    uint64_t at = begin;
    for (uint64_t i = 0; i < count; ++i) at = entry(at, end);
    if (at != end) complain("its directory of records has {} bytes that are of none", end - at);
    check_overlaps(begin);
    return std::move(records_);
  }

 private:
  struct Directory {
    uint64_t begin, count, end;
  };

  template <class... Args>
  [[noreturn]] void complain(fmt::format_string<Args...> text, Args&&... args) const {
    throw CheckpointError(
        fmt::format("{}: {}", where_, fmt::format(text, std::forward<Args>(args)...)));
  }

  std::string_view piece(uint64_t at, uint64_t count) const {
    if (at > bytes_.size() || count > bytes_.size() - at) {
      complain("is cut short or damaged: {} bytes at {} lie outside of its {}", count, at,
               bytes_.size());
    }
    return bytes_.substr(at, count);
  }
  uint64_t number(uint64_t at, int count) const {
    const auto from = piece(at, count);
    uint64_t value = 0;
    for (int i = count - 1; i >= 0; --i) value = value << 8 | static_cast<uint8_t>(from[i]);
    return value;
  }

  Directory directory() const {
    const uint64_t at = find_end();
    uint64_t count = number(at + 10, 2), size = number(at + 12, 4), begin = number(at + 16, 4);
    if (number(at + 4, 2) != 0 && number(at + 4, 2) != 0xffff) complain("is a part of an archive");
    uint64_t after = at;
    if (at >= kLocatorBytes && number(at - kLocatorBytes, 4) == kLocator64) {
      const uint64_t end64 = number(at - kLocatorBytes + 8, 8);
      if (piece(end64, kEnd64Bytes).empty() || number(end64, 4) != kEnd64) {
        complain("is damaged: zip64's end of the directory is not at {}", end64);
      }
      count = number(end64 + 32, 8);
      size = number(end64 + 40, 8);
      begin = number(end64 + 48, 8);
      after = end64;
    }
    if (begin > after || size > after - begin) {
      complain("is damaged: its directory of {} bytes at {} lies outside", size, begin);
    }
    if (count > size / kEntryBytes) {
      complain("is damaged: {} bytes of directory cannot hold {} records", size, count);
    }
    return {begin, count, begin + size};
  }

  // The last place that looks like the end, with a comment that reaches the file's.
  uint64_t find_end() const {
    if (bytes_.size() >= kEndBytes) {
      const uint64_t last = bytes_.size() - kEndBytes;
      for (uint64_t back = 0; back <= std::min<uint64_t>(last, kMostComment); ++back) {
        const uint64_t at = last - back;
        if (number(at, 4) == kEnd && number(at + 20, 2) == back) return at;
      }
    }
    complain("is cut short or no zip archive: it has no end of a directory");
  }

  // A record that the directory names; returns where the next one stands.
  uint64_t entry(uint64_t at, uint64_t end) {
    if (at + kEntryBytes > end || number(at, 4) != kEntry) {
      complain("is damaged: there is no record in the directory at {}", at);
    }
    const uint64_t flags = number(at + 8, 2), method = number(at + 10, 2);
    uint64_t stored = number(at + 20, 4), size = number(at + 24, 4), local = number(at + 42, 4);
    const uint64_t name_bytes = number(at + 28, 2), extra = number(at + 30, 2);
    const uint64_t next = at + kEntryBytes + name_bytes + extra + number(at + 32, 2);
    if (next > end) complain("is damaged: a record in the directory at {} is cut short", at);
    const std::string name(piece(at + kEntryBytes, name_bytes));
    read_zip64(at + kEntryBytes + name_bytes, extra, {&size, &stored, &local});
    if ((flags & kEncrypted) != 0) complain("record {} is encrypted", in_quotes(name));
    if (piece(local, kLocalBytes).empty() || number(local, 4) != kLocal ||
        number(local + 8, 2) != method || number(local + 26, 2) != name_bytes ||
        piece(local + kLocalBytes, name_bytes) != name) {
      complain("is damaged: record {} is not where the directory says", in_quotes(name));
    }
    const uint64_t begin = local + kLocalBytes + name_bytes + number(local + 28, 2);
    const ZipRecord record{piece(begin, stored), static_cast<uint32_t>(number(at + 16, 4)),
                           method != kStored};
    if (!record.compressed && stored != size) {
      complain("is damaged: record {} has {} and {} bytes", in_quotes(name), stored, size);
    }
    if (!records_.emplace(name, record).second) {
      complain("record {} comes twice", in_quotes(name));
    }
    places_.emplace_back(local, begin + stored);
    return next;
  }

  // Numbers that did not fit, in their order.
  void read_zip64(uint64_t at, uint64_t count, std::vector<uint64_t*> numbers) const {
    std::erase_if(numbers, [](const uint64_t* value) { return *value != kIn64; });
    for (uint64_t end = at + count; !numbers.empty() && at + 4 <= end;) {
      const uint64_t kind = number(at, 2), size = number(at + 2, 2);
      at += 4;
      if (size > end - at) return;  // not a field; torch pads with others
      if (kind == kField64 && size >= 8 * numbers.size()) {
        for (uint64_t* value : numbers) {
          *value = number(at, 8);
          at += 8;
        }
        return;
      }
      at += size;
    }
  }

  void check_overlaps(uint64_t directory) {
    std::sort(places_.begin(), places_.end());
    places_.emplace_back(directory, directory);
    for (size_t i = 1; i < places_.size(); ++i) {
      if (places_[i].first < places_[i - 1].second) complain("is damaged: its records overlap");
    }
  }

  std::string_view bytes_, where_;
  std::map<std::string, ZipRecord> records_;
  std::vector<std::pair<uint64_t, uint64_t>> places_;
};

}  // namespace

std::map<std::string, ZipRecord> parse_zip(std::string_view archive, std::string_view where) {
  return Parser(archive, where).parse();
}

uint32_t crc32_of(std::string_view bytes) {
  return static_cast<uint32_t>(
      crc32_z(0, reinterpret_cast<const Bytef*>(bytes.data()), bytes.size()));
}

}  // namespace lockstep::checkpoint
