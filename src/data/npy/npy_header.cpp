#include "data/npy/npy_header.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <charconv>

#include "core/number.h"
#include "lockstep/core/error.h"

namespace lockstep::data {
namespace {

constexpr std::string_view kMagic = "\x93NUMPY";
constexpr size_t kMostDimensions = 64;  // NumPy's own limit

// The header: a dict of Python's with three keys.
class HeaderParser {
 public:
  HeaderParser(std::string_view text, const std::string& name) : text_(text), name_(name) {}

  NpyHeader parse() {
    NpyHeader header;
    bool has_descr = false, has_order = false, has_shape = false;
    expect('{');
    while (!take('}')) {
      const std::string_view key = quoted();
      expect(':');
      if (key == "descr") {
        skip_spaces();
        if (rest().starts_with("["))
          fail("structured elements are not supported: save one array per field");
        set_dtype(quoted(), header);
        has_descr = true;
      } else if (key == "fortran_order") {
        header.fortran = boolean();
        has_order = true;
      } else if (key == "shape") {
        header.sizes = shape();
        has_shape = true;
      } else {
        fail(fmt::format("the header has an unknown key '{}'", key.substr(0, 40)));
      }
      if (!take(',')) {
        expect('}');
        break;
      }
    }
    skip_spaces();
    if (!rest().empty()) fail("the header has more after its dict");
    if (!has_descr || !has_order || !has_shape) {
      fail("the header lacks descr, fortran_order or shape");
    }
    return header;
  }

  [[noreturn]] void fail(std::string_view what) const {
    throw DataError(fmt::format("[npy] {}: {}", name_, what));
  }

 private:
  std::string_view rest() const { return text_.substr(position_); }
  void skip_spaces() {
    while (!rest().empty() &&
           std::string_view(" \t\r\n").find(rest()[0]) != std::string_view::npos) {
      ++position_;
    }
  }
  bool take(char c) {
    skip_spaces();
    if (!rest().starts_with(c)) return false;
    ++position_;
    return true;
  }
  void expect(char c) {
    if (!take(c)) fail(fmt::format("garbled header: expected '{}' at byte {}", c, position_));
  }
  std::string_view quoted() {
    skip_spaces();
    const char quote = rest().empty() ? ' ' : rest()[0];
    if (quote != '\'' && quote != '"') {
      fail(fmt::format("garbled header: expected a text at byte {}", position_));
    }
    const size_t end = text_.find(quote, position_ + 1);
    if (end == std::string_view::npos) fail("garbled header: a text does not end");
    const std::string_view text = text_.substr(position_ + 1, end - position_ - 1);
    position_ = end + 1;
    return text;
  }
  bool boolean() {
    skip_spaces();
    for (const auto& [word, value] :
         {std::pair<std::string_view, bool>{"True", true}, {"False", false}}) {
      if (!rest().starts_with(word)) continue;
      position_ += word.size();
      return value;
    }
    fail("garbled header: fortran_order is neither True nor False");
  }
  std::vector<int64_t> shape() {
    std::vector<int64_t> sizes;
    expect('(');
    while (!take(')')) {
      skip_spaces();
      int64_t size = 0;
      const auto [end, code] = std::from_chars(rest().data(), rest().data() + rest().size(), size);
      if (code != std::errc() || size < 0) fail("garbled header: the shape has no such size");
      position_ += static_cast<size_t>(end - rest().data());
      (void)take('L');  // as Python 2 wrote them
      sizes.push_back(size);
      if (sizes.size() > kMostDimensions) fail("more than 64 dimensions");
      if (!take(',')) {
        expect(')');
        break;
      }
    }
    return sizes;
  }
  void set_dtype(std::string_view dtype, NpyHeader& header) const {
    const auto refuse = [&] {
      fail(
          fmt::format("elements of dtype '{}' are not supported: use bool, int8 to int64, uint8 to "
                      "uint64, float16 to float64 or complex; `array.astype(...)` converts",
                      dtype.substr(0, 40)));
    };
    if (dtype.size() < 3) refuse();
    const char order = dtype[0];
    header.kind = dtype[1];
    header.element_bytes = whole_number_from<int64_t>(dtype.substr(2)).value_or(0);
    const int64_t bytes = header.element_bytes;
    const bool power = bytes == 1 || bytes == 2 || bytes == 4 || bytes == 8;
    const bool known = header.kind == 'b'                         ? bytes == 1
                       : header.kind == 'i' || header.kind == 'u' ? power
                       : header.kind == 'f'                       ? power && bytes > 1
                       : header.kind == 'c'                       ? bytes == 8 || bytes == 16
                                                                  : false;
    if (!known || std::string_view("<>|=").find(order) == std::string_view::npos) refuse();
    header.swapped = order == '>' && bytes > 1;
  }

  std::string_view text_;
  const std::string& name_;
  size_t position_ = 0;
};

}  // namespace

NpyHeader parse_npy(std::string_view bytes, const std::string& name) {
  const auto fail = [&](const std::string& what) {
    throw DataError(fmt::format("[npy] {}: {}", name, what));
  };
  if (bytes.starts_with("PK")) {
    fail("is an archive, as numpy.savez writes them: unzip it and give one of its .npy files");
  }
  if (!bytes.starts_with(kMagic)) fail("is not an .npy file: it does not begin with \\x93NUMPY");
  if (bytes.size() < 10) fail(fmt::format("truncated: {} bytes have no header", bytes.size()));
  const auto byte = [&](size_t i) {
    return static_cast<size_t>(static_cast<unsigned char>(bytes[i]));
  };
  const size_t version = byte(6);
  if (version < 1 || version > 3 || byte(7) != 0) {
    fail(fmt::format("is of version {}.{}: 1.0, 2.0 and 3.0 are known", version, byte(7)));
  }
  const size_t begin = version == 1 ? 10 : 12;
  if (bytes.size() < begin) fail("truncated within the header's length");
  const size_t length = version == 1 ? byte(8) | byte(9) << 8
                                     : byte(8) | byte(9) << 8 | byte(10) << 16 | byte(11) << 24;
  if (length > bytes.size() - begin) {
    fail(fmt::format("truncated: a header of {} bytes, and the file has {}", length, bytes.size()));
  }
  NpyHeader header = HeaderParser(bytes.substr(begin, length), name).parse();
  header.begin = begin + length;
  header.elements = 1;
  int64_t total = 0, steps = header.element_bytes;
  bool overflows = false;
  for (const int64_t size : header.sizes) {
    overflows = overflows || __builtin_mul_overflow(header.elements, size, &header.elements);
    // Of an array without elements the strides are to be numbers, too, as NumPy has it.
    overflows = overflows || __builtin_mul_overflow(steps, std::max<int64_t>(size, 1), &steps);
  }
  overflows = overflows || __builtin_mul_overflow(header.elements, header.element_bytes, &total);
  const auto there = static_cast<int64_t>(bytes.size() - header.begin);
  if (overflows || total != there) {
    fail(fmt::format("{}: {} elements of {} bytes are expected, and the file has {} bytes of them",
                     !overflows && total < there ? "too long" : "truncated, or a wrong shape",
                     fmt::join(header.sizes, " x "), header.element_bytes, there));
  }
  return header;
}

}  // namespace lockstep::data
