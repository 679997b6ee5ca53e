#include "comm/store/protocol.h"

#include <fmt/format.h>

#include <cstring>

#include "lockstep/core/error.h"

namespace lockstep::comm {
namespace {

constexpr uint64_t kMostTexts = uint64_t{1} << 20;

class Unfinished {};

class Reader {
 public:
  explicit Reader(std::string_view in) : left_(in) {}

  template <class T>
  T number() {
    T value;
    std::memcpy(&value, bytes(sizeof value).data(), sizeof value);
    return value;
  }
  std::string_view text() {
    const auto length = number<uint64_t>();
    if (length > kMostText) throw Error(fmt::format("a text of {} bytes", length));
    return bytes(length);
  }
  std::string_view left() const { return left_; }

 private:
  std::string_view bytes(uint64_t count) {
    if (left_.size() < count) throw Unfinished();
    const auto bytes = left_.substr(0, count);
    left_.remove_prefix(count);
    return bytes;
  }

  std::string_view left_;
};

struct Shape {
  int texts = 0;   // -1: a count, and as many; -2: twice as many
  int number = 0;  // bytes of the number after them
};

Shape shape_of(uint8_t query) {
  switch (static_cast<StoreQuery>(query)) {
    case StoreQuery::Validate:
    case StoreQuery::Ping:
      return {.number = 4};
    case StoreQuery::Set:
    case StoreQuery::Append:
    case StoreQuery::Push:
      return {.texts = 2};
    case StoreQuery::CompareSet:
      return {.texts = 3};
    case StoreQuery::Get:
    case StoreQuery::Delete:
    case StoreQuery::Pop:
    case StoreQuery::QueueLength:
      return {.texts = 1};
    case StoreQuery::Add:
    case StoreQuery::Barrier:
      return {.texts = 1, .number = 8};
    case StoreQuery::Check:
    case StoreQuery::Wait:
    case StoreQuery::MultiGet:
      return {.texts = -1};
    case StoreQuery::MultiSet:
      return {.texts = -2};
    case StoreQuery::CountKeys:
    case StoreQuery::CancelWait:
    case StoreQuery::ListKeys:
      return {};
  }
  throw Error(fmt::format("an unknown query, {}", query));
}

StoreRequest read_request(Reader& in) {
  const auto query = in.number<uint8_t>();
  const Shape shape = shape_of(query);
  StoreRequest request{.query = static_cast<StoreQuery>(query), .texts = {}};
  uint64_t texts = shape.texts < 0 ? in.number<uint64_t>() : shape.texts;
  if (texts > kMostTexts) throw Error(fmt::format("{} keys", texts));
  if (shape.texts == -2) texts *= 2;
  // Nothing is copied before all of it is there: what is read is looked at again after each piece.
  Reader ahead = in;
  for (uint64_t i = 0; i < texts; ++i) (void)ahead.text();
  for (int i = 0; i < shape.number; ++i) (void)ahead.number<char>();
  for (uint64_t i = 0; i < texts; ++i) request.texts.emplace_back(in.text());
  if (shape.number == 4) request.number = in.number<uint32_t>();
  if (shape.number == 8) request.number = in.number<int64_t>();
  return request;
}

}  // namespace

std::optional<StoreRequest> take_request(std::string_view& in) {
  Reader reader(in);
  try {
    StoreRequest request = read_request(reader);
    in = reader.left();
    return request;
  } catch (const Unfinished&) {
    return std::nullopt;
  }
}

}  // namespace lockstep::comm
