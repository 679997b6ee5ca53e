#include "random/group/reference.h"

#include <c10/util/BFloat16.h>
#include <c10/util/Float8_e4m3fn.h>
#include <c10/util/Float8_e5m2.h>
#include <c10/util/Half.h>
#include <c10/util/complex.h>
#include <fmt/format.h>

#include <algorithm>
#include <cstring>
#include <limits>
#include <set>

#include "random/common/dice.h"

namespace lockstep::random_group {
namespace {

using comm::ReduceOp;

// Calls `body` with a value of the dtype's type; bool is handled as a type of its own.
template <class Body>
auto with_type(c10::ScalarType dtype, const Body& body) {
  switch (dtype) {
    case c10::kFloat:
      return body(float{});
    case c10::kDouble:
      return body(double{});
    case c10::kHalf:
      return body(c10::Half{});
    case c10::kBFloat16:
      return body(c10::BFloat16{});
    case c10::kChar:
      return body(int8_t{});
    case c10::kShort:
      return body(int16_t{});
    case c10::kInt:
      return body(int32_t{});
    case c10::kLong:
      return body(int64_t{});
    case c10::kByte:
      return body(uint8_t{});
    case c10::kUInt16:
      return body(uint16_t{});
    case c10::kUInt32:
      return body(uint32_t{});
    case c10::kUInt64:
      return body(uint64_t{});
    case c10::kFloat8_e4m3fn:
      return body(c10::Float8_e4m3fn{});
    case c10::kFloat8_e5m2:
      return body(c10::Float8_e5m2{});
    case c10::kComplexFloat:
      return body(c10::complex<float>{});
    case c10::kComplexDouble:
      return body(c10::complex<double>{});
    default:
      return body(bool{});
  }
}

template <class T>
constexpr bool is_float = !std::is_integral_v<T>;

template <class T>
T real_value_of(uint64_t bits, bool small) {
  if constexpr (std::is_same_v<T, bool>) return bits % 2 == 1;
  if (small) return static_cast<T>(static_cast<float>(bits % 3));
  if constexpr (is_float<T>) {
    const auto eighths = static_cast<float>(static_cast<int64_t>(bits >> 8) % 4096 - 2048) / 8;
    if (bits % 64 == 0) return std::numeric_limits<T>::quiet_NaN();
    if (bits % 64 == 1) return static_cast<T>(std::numeric_limits<float>::infinity());
    if (bits % 64 == 2) return static_cast<T>(eighths * 1e4f);
    if (bits % 64 == 3) return static_cast<T>(eighths * 1e-6f);
    return static_cast<T>(eighths / (bits % 64 < 32 ? 1.f : 3.f));
  } else {
    return static_cast<T>(bits);
  }
}

template <class T>
constexpr bool is_complex =
    std::is_same_v<T, c10::complex<float>> || std::is_same_v<T, c10::complex<double>>;

template <class T>
T value_of(uint64_t bits, bool small) {
  if constexpr (is_complex<T>) {
    using Part = typename T::value_type;
    return {value_of<Part>(bits, small), value_of<Part>(mixed(bits), small)};
  } else {
    return real_value_of<T>(bits, small);
  }
}
template <class T>
T two_combined(ReduceOp op, T a, T b) {
  if constexpr (std::is_same_v<T, bool>) {
    const bool any = op == ReduceOp::Sum || op == ReduceOp::Max || op == ReduceOp::BitwiseOr;
    if (op == ReduceOp::BitwiseXor) return a != b;
    return any ? (a || b) : (a && b);
  } else if constexpr (is_complex<T>) {
    return op == ReduceOp::Product ? a * b : a + b;
  } else {
    switch (op) {
      case ReduceOp::Sum:
      case ReduceOp::Average:
      case ReduceOp::PreMulSum:
        if constexpr (std::is_integral_v<T>)
          return static_cast<T>(static_cast<uint64_t>(a) + static_cast<uint64_t>(b));
        else
          return static_cast<T>(a + b);
      case ReduceOp::Product:
        if constexpr (std::is_integral_v<T>)
          return static_cast<T>(static_cast<uint64_t>(a) * static_cast<uint64_t>(b));
        else
          return static_cast<T>(a * b);
      case ReduceOp::Min:
        if (a != a || b != b) return a != a ? a : b;
        return b < a ? b : a;
      case ReduceOp::Max:
        if (a != a || b != b) return a != a ? a : b;
        return b > a ? b : a;
      default:
        if constexpr (std::is_integral_v<T>)
          return static_cast<T>(op == ReduceOp::BitwiseAnd   ? a & b
                                : op == ReduceOp::BitwiseXor ? a ^ b
                                                             : a | b);
        else
          return a;
    }
  }
}

// Rounded to its dtype before it is added to anything.
template <class T>
T multiplied(T value, double factor) {
  if constexpr (std::is_same_v<T, float> || std::is_same_v<T, double>)
    return value * static_cast<T>(factor);
  else if constexpr (is_complex<T>)
    return {multiplied(value.real(), factor), multiplied(value.imag(), factor)};
  else if constexpr (is_float<T>)
    return static_cast<T>(static_cast<float>(value) * static_cast<float>(factor));
  else
    return value;
}

// One rank's, and what it multiplies by for a PreMulSum.
template <class T>
struct Part {
  const T* values;
  double factor;
};

// n ranks split at the largest power of two below n.
template <class T>
T tree(ReduceOp op, const std::vector<Part<T>>& parts, size_t begin, size_t end, int64_t at) {
  if (end - begin == 1) {
    const T own = parts[begin].values[at];
    return op == ReduceOp::PreMulSum ? multiplied(own, parts[begin].factor) : own;
  }
  size_t left = 1;
  while (2 * left < end - begin) left *= 2;
  return two_combined(op, tree(op, parts, begin, begin + left, at),
                      tree(op, parts, begin + left, end, at));
}

template <class T>
T divided(T sum, int by) {
  if constexpr (is_complex<T>)
    return {divided(sum.real(), by), divided(sum.imag(), by)};
  else if constexpr (std::is_same_v<T, float> || std::is_same_v<T, double>)
    return sum / static_cast<T>(by);
  else if constexpr (is_float<T>)
    return static_cast<T>(static_cast<float>(sum) / static_cast<float>(by));
  else if constexpr (std::is_unsigned_v<T>)
    return static_cast<T>(static_cast<uint64_t>(sum) / static_cast<uint64_t>(by));
  else
    return static_cast<T>(static_cast<int64_t>(sum) / by);
}

template <class T>
bool alike(const char* a, const char* b) {
  T x, y;
  std::memcpy(&x, a, sizeof x);
  std::memcpy(&y, b, sizeof y);
  if constexpr (is_complex<T>) {
    using Part = typename T::value_type;
    return alike<Part>(a, b) && alike<Part>(a + sizeof(Part), b + sizeof(Part));
  } else if constexpr (is_float<T>) {
    // Which NaN, and the sign of a zero, are nobody's promise.
    if (x == y || (x != x && y != y)) return true;
  }
  return std::memcmp(a, b, sizeof(T)) == 0;
}

template <class T>
std::string shown(const char* at) {
  T value;
  std::memcpy(&value, at, sizeof value);
  if constexpr (is_complex<T>)
    return fmt::format("{} + {} i", value.real(), value.imag());
  else if constexpr (is_float<T>)
    return fmt::format("{}", static_cast<double>(value));
  else
    return fmt::format("{}", static_cast<int64_t>(value));
}

std::vector<char> piece(const std::vector<char>& whole, int64_t index, int64_t pieces) {
  const auto each = static_cast<int64_t>(whole.size()) / pieces;
  return {whole.begin() + index * each, whole.begin() + (index + 1) * each};
}

}  // namespace

void fill(char* at, c10::ScalarType dtype, const Filling& filling, int64_t count) {
  with_type(dtype, [&](auto type) {
    using T = decltype(type);
    for (int64_t i = 0; i < count; ++i) {
      const T value = value_of<T>(mixed(filling.seed + static_cast<uint64_t>(i)), filling.small);
      std::memcpy(at + i * static_cast<int64_t>(sizeof(T)), &value, sizeof value);
    }
  });
}

Filling filling_of(const Program& program, int op, int buffer, int rank) {
  return {mixed(program.ops[op].seed, 10 + buffer, program.ranks[rank]), program.ops[op].small};
}

std::vector<int> buffers_of(const Plan& plan, int op, int rank) {
  std::set<int> buffers;
  const Call& call = *plan.calls[op][rank];
  for (const auto* views : {&call.inputs, &call.outputs}) {
    for (const View& view : *views) buffers.insert(view.buffer);
  }
  return {buffers.begin(), buffers.end()};
}

Reference::Reference(const Program& program, const Plan& plan)
    : program_(program), plan_(plan), memory_(program.arenas.size()) {
  for (size_t a = 0; a < program.arenas.size(); ++a) {
    const Arena& arena = program.arenas[a];
    for (const int rank : program.ranks) {
      Bytes bytes(plan.arena_sizes[a] * static_cast<int64_t>(c10::elementSize(arena.dtype)));
      fill(bytes.data(), arena.dtype, {mixed(arena.seed, rank), false}, plan.arena_sizes[a]);
      memory_[a].push_back(std::move(bytes));
    }
  }
}

Reference::Bytes Reference::take(int rank, const View& view) const {
  const auto element = static_cast<int64_t>(c10::elementSize(program_.arenas[view.arena].dtype));
  const Bytes& memory = memory_[view.arena][rank];
  Bytes bytes;
  for (const int64_t place : view.places()) {
    bytes.insert(bytes.end(), memory.begin() + place * element,
                 memory.begin() + (place + 1) * element);
  }
  return bytes;
}

void Reference::put(int rank, const View& view, const char* from) {
  const auto element = static_cast<int64_t>(c10::elementSize(program_.arenas[view.arena].dtype));
  for (const int64_t place : view.places()) {
    std::copy_n(from, element, memory_[view.arena][rank].begin() + place * element);
    from += element;
  }
}

Reference::Bytes Reference::combined(const Op& op, c10::ScalarType dtype,
                                     const std::vector<Bytes>& parts,
                                     const std::vector<int>& members) const {
  Bytes result(parts[0].size());
  with_type(dtype, [&](auto type) {
    using T = decltype(type);
    std::vector<Part<T>> typed;
    for (size_t r = 0; r < parts.size(); ++r) {
      typed.push_back(
          {reinterpret_cast<const T*>(parts[r].data()), factor_of(op, program_.ranks[members[r]])});
    }
    for (int64_t i = 0; i < static_cast<int64_t>(result.size() / sizeof(T)); ++i) {
      T value = tree(op.op, typed, 0, typed.size(), i);
      const int by = op.divide_by > 0 ? op.divide_by : static_cast<int>(parts.size());
      if (op.op == ReduceOp::Average) value = divided(value, by);
      std::memcpy(result.data() + i * static_cast<int64_t>(sizeof(T)), &value, sizeof value);
    }
  });
  return result;
}

void Reference::run(int op) {
  std::set<int> done;
  for (int rank = 0; rank < program_.size(); ++rank) {
    if (!plan_.calls[op][rank] || !program_.ops[op].fill) continue;
    for (const int buffer : buffers_of(plan_, op, rank)) {
      const auto& place = plan_.buffers[buffer];
      const int arena = program_.buffers[buffer].arena;
      const c10::ScalarType dtype = program_.arenas[arena].dtype;
      fill(
          memory_[arena][rank].data() + place.begin * static_cast<int64_t>(c10::elementSize(dtype)),
          dtype, filling_of(program_, op, buffer, rank), place.count);
    }
  }
  for (int rank = 0; rank < program_.size(); ++rank) {
    if (!plan_.calls[op][rank] || done.count(rank)) continue;
    const std::vector<int>& members = plan_.calls[op][rank]->members;
    done.insert(members.begin(), members.end());
    run_group(op, members);
  }
}

void Reference::run_group(int index, const std::vector<int>& members) {
  const Op& op = program_.ops[index];
  const auto size = static_cast<int>(members.size());
  std::vector<const Call*> calls;
  std::vector<std::vector<Bytes>> given(size), results(size);
  for (int r = 0; r < size; ++r) {
    const auto& call = plan_.calls[index][members[r]];
    calls.push_back(call ? &*call : nullptr);
    if (!call) continue;
    for (const View& view : is_in_place(op.what) ? call->outputs : call->inputs)
      given[r].push_back(take(members[r], view));
  }
  const int root = calls[0] ? calls[0]->root : op.root % size;
  // Rank r's part of what rank `from` gave.
  const auto from_to = [&](int from, int r) {
    return op.list ? given[from][r] : piece(given[from][0], r, size);
  };
  // Of what becomes rank r's k-th output.
  const auto over_ranks = [&](int r, size_t k, const auto& part_of) {
    std::vector<Bytes> parts;
    for (int from = 0; from < size; ++from) parts.push_back(part_of(from));
    return combined(op, program_.arenas[calls[r]->outputs[k].arena].dtype, parts, members);
  };
  const auto joined = [&](std::vector<Bytes> parts) {
    if (op.list) return parts;
    Bytes whole;
    for (const Bytes& part : parts) whole.insert(whole.end(), part.begin(), part.end());
    return std::vector<Bytes>(1, std::move(whole));
  };
  for (int r = 0; r < size; ++r) {
    switch (op.what) {
      case What::AllReduce:
      case What::Reduce:
        if (op.what == What::AllReduce || r == root) {
          results[r] = {over_ranks(r, 0, [&](int from) { return given[from][0]; })};
        }
        break;
      case What::ReduceScatter:
        results[r] = {over_ranks(r, 0, [&](int from) { return from_to(from, r); })};
        break;
      case What::AllReduces:
      case What::ReduceScatters:
        for (size_t k = 0; calls[r] && k < calls[r]->outputs.size(); ++k) {
          const bool is_whole = op.what == What::AllReduces;
          results[r].push_back(over_ranks(r, k, [&](int from) {
            return is_whole ? given[from][k] : piece(given[from][k], r, size);
          }));
        }
        break;
      case What::AllGathers:
        for (size_t k = 0; k < given[r].size(); ++k) {
          Bytes& whole = results[r].emplace_back();
          for (const auto& from : given) whole.insert(whole.end(), from[k].begin(), from[k].end());
        }
        break;
      case What::SendRecv:
        results[r] = given[calls[r]->root];
        break;
      case What::AllGather:
      case What::AllToAll: {
        std::vector<Bytes> parts;
        for (int from = 0; from < size; ++from) {
          parts.push_back(op.what == What::AllGather ? given[from][0] : from_to(from, r));
        }
        results[r] = joined(std::move(parts));
        break;
      }
      case What::Broadcast:
      case What::Broadcasts:
        results[r] = given[root];
        break;
      case What::Gather:
        if (r != root) break;
        for (int from = 0; from < size; ++from) results[r].push_back(given[from][0]);
        break;
      case What::Scatter:
        results[r] = {given[root][r]};
        break;
      case What::Message:
        if (calls[r] && calls[r]->receives) results[r] = given[calls[r]->root];
        break;
      default:
        break;
    }
  }
  for (int r = 0; r < size; ++r) {
    for (size_t k = 0; k < results[r].size(); ++k)
      put(members[r], calls[r]->outputs[k], results[r][k].data());
  }
}

std::string Reference::difference(int arena, int rank, const char* got,
                                  const std::vector<int64_t>& places) const {
  const c10::ScalarType dtype = program_.arenas[arena].dtype;
  const char* want = memory_[arena][rank].data();
  return with_type(dtype, [&](auto type) -> std::string {
    using T = decltype(type);
    std::string text;
    int64_t differ = 0;
    for (const int64_t place : places) {
      const int64_t at = place * static_cast<int64_t>(sizeof(T));
      if (alike<T>(got + at, want + at)) continue;
      if (++differ <= 4)
        text += fmt::format(" m{}[{}] is {}, want {};", arena, place, shown<T>(got + at),
                            shown<T>(want + at));
    }
    return differ == 0 ? ""
                       : fmt::format("{} of {} elements differ:{}", differ, places.size(), text);
  });
}

}  // namespace lockstep::random_group
