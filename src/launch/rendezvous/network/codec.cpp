#include "launch/rendezvous/network/codec.h"

#include <fmt/format.h>

#include <type_traits>
#include <utility>

namespace lockstep::launch {
namespace {

constexpr size_t kMostText = 4000;

// One list of fields for both directions: `io` writes them or reads them.
template <class Io, class One>
void fields(Io&, One&) = delete;

template <class Io>
void fields(Io& io, JobSpec& one) {
  io(one.min_nodes), io(one.max_nodes), io(one.max_restarts), io(one.lease), io(one.grace);
  io(one.command_hash), io(one.command);
}
template <class Io>
void fields(Io& io, Past& one) {
  io(one.coordinator), io(one.attempt), io(one.hosts), io(one.id), io(one.has_ranks);
}
template <class Io>
void fields(Io& io, Failure& one) {
  io(one.kind), io(one.rank), io(one.status), io(one.what), io(one.ago);
}
template <class Io>
void fields(Io& io, HostRanks& one) {
  io(one.id), io(one.ranks);
}
template <class Io>
void fields(Io& io, Join& one) {
  io(one.launcher), io(one.host), io(one.node_rank), io(one.ranks), io(one.address),
      io(one.job_spec);
  io(one.past);
}
template <class Io>
void fields(Io& io, Welcome& one) {
  io(one.id), io(one.coordinator), io(one.attempt), io(one.hosts);
}
template <class Io>
void fields(Io& io, Wait& one) {
  io(one.reason);
}
template <class Io>
void fields(Io& io, Refuse& one) {
  io(one.reason);
}
template <class Io>
void fields(Io& io, Ping& one) {
  io(one.number);
}
template <class Io>
void fields(Io& io, Pong& one) {
  io(one.number);
}
template <class Io>
void fields(Io& io, Ready& one) {
  io(one.attempt), io(one.store_port), io(one.failure);
}
template <class Io>
void fields(Io& io, Failed& one) {
  io(one.attempt), io(one.failure);
}
template <class Io>
void fields(Io& io, Done& one) {
  io(one.attempt);
}
template <class Io>
void fields(Io& io, Remark& one) {
  io(one.id), io(one.text);
}
template <class Io>
void fields(Io& io, Start& one) {
  io(one.attempt), io(one.hosts), io(one.master_addr), io(one.master_port), io(one.why);
}
template <class Io>
void fields(Io& io, Stop& one) {
  io(one.attempt), io(one.signal), io(one.why);
}
template <class Io>
void fields(Io& io, End& one) {
  io(one.status), io(one.why);
}

class FrameWriter {
 public:
  template <class Value>
  void operator()(Value& value) {
    if constexpr (std::is_enum_v<Value> || std::is_same_v<Value, bool>) {
      number(static_cast<uint64_t>(value));
    } else if constexpr (std::is_same_v<Value, Time>) {
      signed_number(value.count());
    } else if constexpr (std::is_integral_v<Value> && std::is_signed_v<Value>) {
      signed_number(value);
    } else if constexpr (std::is_integral_v<Value>) {
      number(value);
    } else {
      fields(*this, value);
    }
  }
  void operator()(std::string& text) {
    const std::string_view cut = std::string_view(text).substr(0, kMostText);
    number(cut.size());
    bytes_ += cut;
  }
  template <class Value>
  void operator()(std::optional<Value>& value) {
    number(value.has_value());
    if (value) (*this)(*value);
  }
  template <class Value>
  void operator()(std::vector<Value>& values) {
    number(values.size());
    for (Value& value : values) (*this)(value);
  }

  void number(uint64_t value) {
    for (; value >= 0x80; value >>= 7) bytes_ += static_cast<char>(value | 0x80);
    bytes_ += static_cast<char>(value);
  }
  std::string take() { return std::move(bytes_); }

 private:
  void signed_number(int64_t value) {
    number(static_cast<uint64_t>(value) << 1 ^ static_cast<uint64_t>(value >> 63));
  }
  std::string bytes_;
};

class Reader {
 public:
  explicit Reader(std::string_view bytes) : bytes_(bytes) {}

  template <class Value>
  void operator()(Value& value) {
    if constexpr (std::is_same_v<Value, bool>) {
      value = below(2) != 0;
    } else if constexpr (std::is_same_v<Value, Failure::Kind>) {
      value =
          static_cast<Failure::Kind>(below(static_cast<uint64_t>(Failure::Kind::Unstarted) + 1));
    } else if constexpr (std::is_same_v<Value, Time>) {
      value = Time(signed_number());
    } else if constexpr (std::is_integral_v<Value> && std::is_signed_v<Value>) {
      const int64_t wide = signed_number();
      value = static_cast<Value>(wide);
      if (value != wide) fail("a number out of range");
    } else if constexpr (std::is_integral_v<Value>) {
      const uint64_t wide = number();
      value = static_cast<Value>(wide);
      if (value != wide) fail("a number out of range");
    } else {
      fields(*this, value);
    }
  }
  void operator()(std::string& text) {
    const size_t length = below(kMostText + 1);
    if (length > bytes_.size()) fail("a text that is cut off");
    text = bytes_.substr(0, length);
    bytes_.remove_prefix(length);
  }
  template <class Value>
  void operator()(std::optional<Value>& value) {
    if (below(2) != 0) (*this)(value.emplace());
  }
  template <class Value>
  void operator()(std::vector<Value>& values) {
    // Each takes a byte at least, so that a forged length cannot ask for memory.
    const uint64_t count = number();
    if (count > bytes_.size()) fail("a list that is cut off");
    values.resize(count);
    for (Value& value : values) (*this)(value);
  }

  uint64_t number() {
    uint64_t value = 0;
    for (int shift = 0; shift < 64; shift += 7) {
      if (bytes_.empty()) fail("a number that is cut off");
      const auto byte = static_cast<uint8_t>(bytes_.front());
      bytes_.remove_prefix(1);
      const uint64_t part = byte & 0x7F;
      if (shift == 63 && part > 1) break;
      value |= part << shift;
      if (byte < 0x80) {
        if (byte == 0 && shift > 0) fail("a number written too long");
        return value;
      }
    }
    fail("a number out of range");
  }
  uint64_t below(uint64_t limit) {
    const uint64_t value = number();
    if (value >= limit) fail("a value out of range");
    return value;
  }
  void end() const {
    if (!bytes_.empty()) fail("bytes after its end");
  }

 private:
  int64_t signed_number() {
    const uint64_t folded = number();
    return static_cast<int64_t>(folded >> 1) ^ -static_cast<int64_t>(folded & 1);
  }
  [[noreturn]] static void fail(const char* what) {
    throw ProtocolError(fmt::format("[rendezvous] a message has {}", what));
  }
  std::string_view bytes_;
};

template <size_t... kinds>
Message read(uint64_t kind, Reader& reader, std::index_sequence<kinds...>) {
  Message message;
  ((kind == kinds ? reader(message.emplace<kinds>()) : void()), ...);
  return message;
}

}  // namespace

std::string encode(const Message& message) {
  FrameWriter writer;
  writer.number(message.index());
  Message copy = message;  // fields() serves the reader, too, and cannot take it as const
  std::visit([&writer](auto& one) { writer(one); }, copy);
  return writer.take();
}

Message decode(std::string_view bytes) {
  Reader reader(bytes);
  constexpr size_t kKinds = std::variant_size_v<Message>;
  const uint64_t kind = reader.below(kKinds);
  Message message = read(kind, reader, std::make_index_sequence<kKinds>());
  reader.end();
  return message;
}

}  // namespace lockstep::launch
