// Parses bytes from outside and so does without torch: tests/fuzz/idx_fuzz.cpp builds it alone.
#include "lockstep/data/idx.h"

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <zlib.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <memory>
#include <string>
#include <string_view>
#include <system_error>

#include "lockstep/core/error.h"

namespace lockstep::data {
namespace {

constexpr uint8_t kUnsignedByte = 0x08;
constexpr int kMaxDimensions = 4;
// Deflate cannot shrink further: no honest file claims more elements than this times its size.
constexpr int64_t kMaxCompression = 1032;
constexpr size_t kChunk = size_t{1} << 20;

// A file being unpacked, or read as it is when it is not gzip: zlib tells by the first bytes.
class Source {
 public:
  explicit Source(const std::filesystem::path& file) : name_(file.string()) {
    std::error_code status;
    packed_size_ = static_cast<int64_t>(std::filesystem::file_size(file, status));
    if (status) fail(fmt::format("cannot be read: {}", status.message()));
    file_.reset(gzopen(file.c_str(), "rb"));
    if (!file_) fail(fmt::format("cannot be opened: {}", std::strerror(errno)));
    gzbuffer(file_.get(), 1U << 17);
  }

  // Fills `to` as far as the file goes; the count of bytes read.
  size_t read(uint8_t* to, size_t count) {
    size_t done = 0;
    while (done < count) {
      const auto ask = static_cast<unsigned>(std::min(count - done, kChunk));
      const int got = gzread(file_.get(), to + done, ask);
      if (got < 0) fail_unpacking();
      if (got == 0) break;
      done += static_cast<size_t>(got);
      total_ += got;
    }
    // A stream that ends early is an error only of the read that reaches its end.
    int code = Z_OK;
    gzerror(file_.get(), &code);
    if (code != Z_OK && code != Z_STREAM_END) fail_unpacking();
    return done;
  }

  bool is_gzip() const { return gzdirect(file_.get()) == 0; }
  int64_t packed_size() const { return packed_size_; }

  [[noreturn]] void fail(std::string_view what) const {
    throw DataError(fmt::format("[idx] {}: {}", name_, what));
  }

 private:
  [[noreturn]] void fail_unpacking() const {
    int code = Z_OK;
    const std::string reason = gzerror(file_.get(), &code);
    if (code == Z_BUF_ERROR) {
      fail(
          fmt::format("truncated: the gzip stream stops after {} bytes ({} unpacked) without its "
                      "end; copy the file again",
                      packed_size_, total_));
    }
    if (code == Z_ERRNO) fail(fmt::format("cannot be read: {}", std::strerror(errno)));
    fail(fmt::format("garbled: gzip says '{}' after {} unpacked bytes; copy the file again", reason,
                     total_));
  }

  struct Close {
    void operator()(gzFile file) const { gzclose_r(file); }
  };
  std::string name_;
  int64_t packed_size_ = 0;
  int64_t total_ = 0;
  std::unique_ptr<gzFile_s, Close> file_;
};

std::string product_text(const std::vector<int64_t>& sizes) {
  return fmt::format("{}", fmt::join(sizes, " x "));
}

std::vector<int64_t> read_sizes(Source& source) {
  std::array<uint8_t, 4> magic{};
  const size_t got = source.read(magic.data(), magic.size());
  if (got < magic.size()) {
    source.fail(fmt::format("truncated: expected a header of at least 8 bytes, found {}", got));
  }
  const int dimensions = magic[3];
  if (magic[0] != 0 || magic[1] != 0 || magic[2] != kUnsignedByte || dimensions < 1 ||
      dimensions > kMaxDimensions) {
    source.fail(fmt::format(
        "wrong magic: expected 00 00 08 01 to 00 00 08 04 (unsigned bytes), found {:02x} ({})",
        fmt::join(magic, " "), source.is_gzip() ? "unpacked from gzip" : "not gzip"));
  }
  std::vector<int64_t> sizes;
  for (int i = 0; i < dimensions; ++i) {
    std::array<uint8_t, 4> b{};
    if (source.read(b.data(), b.size()) < b.size()) {
      source.fail(
          fmt::format("truncated: the header ends before dimension {} of {}", i + 1, dimensions));
    }
    sizes.push_back(int64_t{b[0]} << 24 | int64_t{b[1]} << 16 | int64_t{b[2]} << 8 | b[3]);
  }
  return sizes;
}

// The product of the sizes, unless no such file can be.
int64_t checked_count(const Source& source, const std::vector<int64_t>& sizes) {
  int64_t count = 1;
  for (const int64_t size : sizes) {
    if (__builtin_mul_overflow(count, size, &count)) {
      source.fail(
          fmt::format("wrong sizes: {} elements do not fit into 64 bits", product_text(sizes)));
    }
  }
  const int64_t most = source.packed_size() * (source.is_gzip() ? kMaxCompression : 1);
  if (count > most) {
    source.fail(
        fmt::format("truncated, or wrong sizes: expected {} = {} elements, but a file of {} "
                    "bytes holds at most {}",
                    product_text(sizes), count, source.packed_size(), most));
  }
  return count;
}

}  // namespace

IdxArray read_idx(const std::filesystem::path& file) {
  Source source(file);
  IdxArray array;
  array.sizes = read_sizes(source);
  const int64_t count = checked_count(source, array.sizes);
  array.bytes.resize(static_cast<size_t>(count));
  const size_t got = source.read(array.bytes.data(), array.bytes.size());
  if (got < array.bytes.size()) {
    source.fail(fmt::format("truncated: expected {} = {} elements, found {}",
                            product_text(array.sizes), count, got));
  }
  // Reading past the elements also verifies the gzip checksum.
  uint8_t extra = 0;
  if (source.read(&extra, 1) != 0) {
    source.fail(fmt::format("too long: expected {} = {} elements, found more",
                            product_text(array.sizes), count));
  }
  return array;
}

}  // namespace lockstep::data
