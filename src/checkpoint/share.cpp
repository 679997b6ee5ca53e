#include "checkpoint/share.h"

#include <c10/core/Event.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <fmt/format.h>
#include <fmt/ranges.h>
#include <fnmatch.h>
#include <torch/types.h>

#include <algorithm>
#include <cstring>
#include <set>
#include <unordered_set>

#include "checkpoint/format/checksum.h"
#include "comm/transport.h"
#include "lockstep/core/error.h"
#include "lockstep/core/log.h"

namespace lockstep::checkpoint {
namespace {

constexpr int64_t kLeastCut = 256 << 10;  // bytes

bool is_complex(const std::string& dtype) { return dtype == "C64" || dtype == "C128"; }

int64_t bytes_of(const Piece& piece) {
  return elements(piece.sizes) * static_cast<int64_t>(c10::elementSize(piece.dtype));
}

// The elements of a tensor at bytes [place, place + bytes_of(piece)) of all that are in `range`.
Range cut(const Piece& piece, int64_t place, const Range& range) {
  const int64_t bytes = bytes_of(piece), count = elements(piece.sizes);
  if (bytes < kLeastCut) {
    const bool own = place >= range.begin && place < range.end;
    return own ? Range{0, count} : Range{};
  }
  const int64_t width = bytes / count;
  const auto element = [&](int64_t at) {
    return std::clamp((at - place) / width, int64_t{0}, count);
  };
  return {element(range.begin), element(range.end)};
}

void add_box(Share& share, const Piece& piece, const Box& box, const at::Tensor& values) {
  const std::string dtype = dtype_of(piece.dtype);
  at::Tensor plain = values.detach().resolve_conj().resolve_neg();
  // A device has no memory for all of them twice.
  if (plain.is_cpu()) plain = plain.contiguous();
  if (is_complex(dtype)) plain = at::view_as_real(plain);
  const bool is_whole = box == whole(piece.sizes);
  const std::string element = dtype == "C64" ? "F32" : dtype == "C128" ? "F64" : dtype;
  share.boxes.push_back({piece.name, dtype, piece.sizes, box});
  share.entries.push_back({is_whole ? piece.name : piece.name + text_of(box),
                           *Dtype::named(element),
                           plain.sizes().vec(),
                           {static_cast<const char*>(plain.const_data_ptr()), plain.nbytes()}});
  share.kept.push_back(std::move(plain));
}

// One after another.
at::Tensor flat_bytes_of(const at::Tensor& tensor) {
  return tensor.contiguous().as_strided({tensor.numel()}, {1}).view(at::kByte);
}

// A GPU copies into pinned memory at the speed of its bus.
at::Tensor save_memory(int64_t bytes, bool pinned) {
  if (pinned) {
    try {
      return at::empty({bytes}, at::TensorOptions(at::kByte).pinned_memory(true));
    } catch (const c10::Error& error) {
      log::warn(
          fmt::format("[checkpoint] no pinned memory of {} bytes ({}): saves hold up the "
                      "training for longer",
                      bytes, error.what_without_backtrace()));
    }
  }
  return at::empty({bytes}, at::kByte);
}

void check(const Piece& piece) {
  if (const auto fault = fault_of_parts(piece); !fault.empty()) {
    throw ConfigError(fmt::format("[checkpoint] {}: {}", piece.name, fault));
  }
  const bool is_all = piece.parts.size() == 1 && piece.parts.front().box == whole(piece.sizes);
  if (piece.held == Held::ByAll && !is_all) {
    throw ConfigError(fmt::format(
        "[checkpoint] {}: every rank has all of it (Held::ByAll), and gives {}: give "
        "the whole as one part, or say Held::InParts",
        piece.name, piece.parts.empty() ? "no part" : text_of(piece.parts.front().box)));
  }
  dtype_of(piece.dtype);
}

// The bits of all elements of a small tensor, and of some that lie far apart in a large one: enough
// to see that ranks have trained apart. Reading all would take as long as copying them.
std::string bits_of(const at::Tensor& tensor) {
  constexpr int64_t kAll = 256, kSome = 32;
  const int64_t count = tensor.numel();
  if (!tensor.device().is_cpu() || count == 0) return "";
  const int64_t looks = count <= kAll ? count : kSome;
  const auto width = static_cast<int64_t>(tensor.element_size());
  const auto* data = static_cast<const char*>(tensor.const_data_ptr());
  std::string bytes;
  for (int64_t look = 0; look < looks; ++look) {
    int64_t index = looks == 1 ? 0 : look * (count - 1) / (looks - 1), offset = 0;
    for (int64_t d = tensor.dim() - 1; d >= 0; --d) {
      offset += index % tensor.size(d) * tensor.stride(d);
      index /= tensor.size(d);
    }
    bytes.append(data + offset * width, width);
  }
  return " with the bits " + hex(checksum(bytes));
}

struct ValueText {
  std::string operator()(const std::string& value) const { return "text " + value; }
  // The shortest text that gives the same bits.
  std::string operator()(double value) const { return fmt::format("{}", value); }
  std::string operator()(const std::vector<double>& value) const {
    return fmt::format("reals {}", fmt::join(value, " "));
  }
  std::string operator()(const std::vector<int64_t>& value) const {
    return fmt::format("{}", fmt::join(value, " "));
  }
  template <class T>
  std::string operator()(T value) const {
    return fmt::format("{}", value);
  }
};

}  // namespace

std::string fault_of_parts(const Piece& piece) {
  for (const auto& [box, tensor] : piece.parts) {
    if (!tensor.defined()) return text_of(box) + " is given by an undefined tensor";
    if (tensor.layout() != at::kStrided) {
      return text_of(box) +
             " is given by a tensor that is not dense, which no checkpoint has: make it dense (the "
             "momentum of a sparse gradient: train without momentum or by Adagrad, or build the "
             "layer with sparse = false)";
    }
    if (tensor.sizes() != at::IntArrayRef(box.size) || tensor.scalar_type() != piece.dtype) {
      return fmt::format("{} is given by a tensor of {} [{}]", text_of(box),
                         comm::name_of(tensor.scalar_type()), fmt::join(tensor.sizes(), ", "));
    }
    if (!is_inside(piece.sizes, box))
      return fmt::format("{} lies outside of [{}]", text_of(box), fmt::join(piece.sizes, ", "));
  }
  return "";
}

Names names_of(const Tracked& tracked) {
  Names names;
  for (const auto& [name, object] : tracked) object->add_names(name, names);
  return names;
}

bool matches(const std::string& name, const std::vector<std::string>& patterns) {
  return std::any_of(patterns.begin(), patterns.end(), [&](const std::string& pattern) {
    return pattern == name || fnmatch(pattern.c_str(), name.c_str(), 0) == 0;
  });
}

bool matches_with_object(const std::string& name, const std::vector<std::string>& patterns) {
  return matches(name, patterns) || matches(name.substr(0, name.find('/')), patterns);
}

bool EachRank::has(const std::string& name) const { return matches_with_object(name, patterns); }

std::vector<std::string> EachRank::unused(const State& state) const {
  const std::string suffix = name_of("", rank);
  std::vector<std::string> out;
  for (const auto& pattern : patterns) {
    const EachRank one{{pattern}, rank};
    const auto is_of_it = [&](const Piece& piece) {
      const std::string_view name = piece.name;
      return one.has(std::string(
          name.substr(0, name.ends_with(suffix) ? name.size() - suffix.size() : name.size())));
    };
    if (std::none_of(state.pieces.begin(), state.pieces.end(), is_of_it)) out.push_back(pattern);
  }
  return out;
}

std::string EachRank::name_of(const std::string& name, int64_t rank) {
  return fmt::format("{}/rank-{}", name, rank);
}

State described(const Tracked& tracked, const EachRank& each_rank) {
  const Names names = names_of(tracked);
  State all;
  std::set<std::string> seen;
  for (const auto& [name, object] : tracked) {
    const std::string prefix = name + "/";
    State state = object->state(names);
    for (auto& piece : state.pieces) {
      piece.name = prefix + piece.name;
      check(piece);
      if (piece.held == Held::ByAll && each_rank.has(piece.name)) {
        piece.name = EachRank::name_of(piece.name, each_rank.rank);
        piece.held = Held::InParts;
      }
      if (!seen.insert(piece.name).second) {
        throw ConfigError(fmt::format("[checkpoint] {} comes twice", piece.name));
      }
      all.pieces.push_back(std::move(piece));
    }
    for (auto& [key, value] : state.values) all.values[prefix + key] = std::move(value);
    for (auto& [key, target] : state.aliases) {
      if (!each_rank.has(prefix + target)) all.aliases[prefix + key] = prefix + target;
    }
  }
  return all;
}

std::vector<std::string> common_lines(const State& state) {
  std::vector<std::string> lines;
  for (const auto& piece : state.pieces) {
    if (piece.held != Held::ByAll) continue;
    lines.push_back(fmt::format("tensor {}: {} [{}]{}", piece.name, dtype_of(piece.dtype),
                                fmt::join(piece.sizes, ", "), bits_of(piece.parts.front().tensor)));
  }
  for (const auto& [name, value] : state.values) {
    lines.push_back(fmt::format("value {}: {}", name, std::visit(ValueText(), value)));
  }
  for (const auto& [name, target] : state.aliases) {
    lines.push_back(fmt::format("{} is {}", name, target));
  }
  return lines;
}

Share share_of(const State& state, const Shard& rank) {
  const at::NoGradGuard no_grad;
  int64_t total = 0;
  for (const auto& piece : state.pieces) {
    if (piece.held == Held::ByAll) total += bytes_of(piece);
  }
  const Range own = rank.of(total);
  Share share;
  int64_t place = 0;
  for (const auto& piece : state.pieces) {
    if (piece.held == Held::InParts && piece.is_copy) continue;
    if (piece.held == Held::InParts) {
      for (const auto& [box, values] : piece.parts) {
        // Of a tensor without elements at least its sizes.
        if (values.numel() > 0 || elements(piece.sizes) == 0) add_box(share, piece, box, values);
      }
      continue;
    }
    for (const auto& box : boxes_of(piece.sizes, cut(piece, place, own))) {
      add_box(share, piece, box, narrowed(piece.parts.front().tensor, box));
    }
    place += bytes_of(piece);
  }
  return share;
}

void bring_to_host(Share& share) {
  for (size_t i = 0; i < share.entries.size(); ++i) {
    at::Tensor& tensor = share.kept[i];
    if (tensor.is_cpu()) continue;
    tensor = tensor.to(at::kCPU).contiguous();
    share.entries[i].bytes = {static_cast<const char*>(tensor.const_data_ptr()), tensor.nbytes()};
  }
}

void copy_into(Share& share, at::Tensor& memory) {
  const at::NoGradGuard no_grad;
  int64_t total = 0;
  for (const auto& entry : share.entries) total += static_cast<int64_t>(entry.bytes.size());
  const bool pins = std::any_of(share.kept.begin(), share.kept.end(),
                                [](const at::Tensor& tensor) { return tensor.is_cuda(); });
  if (!memory.defined() || memory.numel() < total) {
    memory.reset();
    memory = save_memory(total, pins);
  }
  std::unordered_set<at::Device> devices;
  int64_t place = 0;
  for (size_t i = 0; i < share.entries.size(); ++i) {
    const at::Tensor& from = share.kept[i];
    const auto bytes = static_cast<int64_t>(share.entries[i].bytes.size());
    char* to = static_cast<char*>(memory.mutable_data_ptr()) + place;
    if (from.is_cpu()) {
      std::memcpy(to, share.entries[i].bytes.data(), bytes);
    } else if (bytes > 0) {
      devices.insert(from.device());
      memory.narrow(0, place, bytes).copy_(flat_bytes_of(from), /*non_blocking=*/true);
    }
    share.entries[i].bytes = {to, static_cast<size_t>(bytes)};
    place += bytes;
  }
  for (const at::Device device : devices) {
    c10::Event copied(device.type());
    copied.record(c10::impl::VirtualGuardImpl(device.type()).getStream(device));
    copied.synchronize();
  }
  share.kept.assign(1, memory);
}

at::Tensor narrowed(at::Tensor tensor, const Box& box) {
  for (size_t d = 0; d < box.size.size(); ++d) {
    const auto dimension = static_cast<int64_t>(d);
    tensor = tensor.narrow(dimension, box.offset[d], box.size[d]);
  }
  return tensor;
}

}  // namespace lockstep::checkpoint
