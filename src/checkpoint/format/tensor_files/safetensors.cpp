#include "lockstep/checkpoint/safetensors.h"

#include <fmt/format.h>

#include <algorithm>
#include <limits>
#include <tuple>

#include "checkpoint/format/checksum.h"
#include "checkpoint/format/json.h"
#include "lockstep/checkpoint/error.h"

namespace lockstep::checkpoint {
namespace {

constexpr int64_t kLengthBytes = 8;
constexpr int64_t kMostHeaderBytes = 100'000'000;  // the format's own limit
constexpr int64_t kAlignment = 64;
constexpr size_t kMostDimensions = 64;  // libtorch's

// Throws with the address.
class Complaint {
 public:
  explicit Complaint(std::string_view where) : where_(where) {}
  template <class... Args>
  [[noreturn]] void operator()(fmt::format_string<Args...> text, Args&&... args) const {
    throw CheckpointError(
        fmt::format("{}: {}", where_, fmt::format(text, std::forward<Args>(args)...)));
  }

 private:
  std::string_view where_;
};

int64_t length_of(std::string_view bytes) {
  uint64_t length = 0;
  for (int i = kLengthBytes - 1; i >= 0; --i) length = length << 8 | static_cast<uint8_t>(bytes[i]);
  return length > std::numeric_limits<int64_t>::max() ? -1 : static_cast<int64_t>(length);
}

// A number that may be a size or an offset.
int64_t number(const Json& json, const std::string& name, const Complaint& complain) {
  if (!json.is_number_unsigned() || json.get<uint64_t>() > uint64_t{1} << 62) {
    complain("tensor {} has a size or offset that is not a whole number from 0 to 2^62",
             in_quotes(name));
  }
  return json.get<int64_t>();
}

FileTensor tensor_from(const std::string& name, const Json& json, const Complaint& complain) {
  if (!json.is_object() || json.size() != 3 || !json.contains("dtype") || !json.contains("shape") ||
      !json.contains("data_offsets") || !json["dtype"].is_string() || !json["shape"].is_array() ||
      !json["data_offsets"].is_array() || json["data_offsets"].size() != 2) {
    complain("tensor {} is not described by dtype, shape and data_offsets", in_quotes(name));
  }
  const auto dtype = Dtype::named(json["dtype"].get<std::string>());
  if (!dtype) {
    complain("tensor {} has the unknown dtype {}", in_quotes(name),
             in_quotes(json["dtype"].get<std::string>()));
  }
  FileTensor tensor{*dtype, {}};
  if (json["shape"].size() > kMostDimensions) {
    complain("tensor {} has {} dimensions, {} are the most", in_quotes(name), json["shape"].size(),
             kMostDimensions);
  }
  int64_t bytes = dtype->bytes();
  for (const auto& size : json["shape"]) {
    tensor.sizes.push_back(number(size, name, complain));
    if (__builtin_mul_overflow(bytes, tensor.sizes.back(), &bytes)) {
      complain("tensor {} has more bytes than 64 bits count", in_quotes(name));
    }
  }
  tensor.begin = number(json["data_offsets"][0], name, complain);
  tensor.end = number(json["data_offsets"][1], name, complain);
  if (tensor.end < tensor.begin || tensor.end - tensor.begin != bytes) {
    complain("tensor {} has data_offsets [{}, {}], but its shape and dtype make {} bytes",
             in_quotes(name), tensor.begin, tensor.end, bytes);
  }
  return tensor;
}

// One after another, from the data's begin to the file's end.
void check_places(const SafetensorsHeader& header, int64_t data_bytes, const Complaint& complain) {
  std::vector<std::tuple<int64_t, int64_t, std::string_view>> places;
  for (const auto& [name, tensor] : header.tensors) {
    places.emplace_back(tensor.begin, tensor.end, name);
  }
  std::sort(places.begin(), places.end());
  int64_t end = 0;
  for (const auto& [begin, next, name] : places) {
    if (begin != end) {
      complain("the data of tensor {} begins at {}, where {} is expected", in_quotes(name), begin,
               end);
    }
    end = next;
  }
  if (end != data_bytes) {
    complain("the tensors have {} bytes, and the file has {} for them: it is {}", end, data_bytes,
             end > data_bytes ? "cut short" : "too long");
  }
}

std::string header_of(std::vector<TensorToWrite>& tensors,
                      const std::map<std::string, std::string>& metadata) {
  std::stable_sort(tensors.begin(), tensors.end(),
                   [](const auto& a, const auto& b) { return a.dtype.bytes() > b.dtype.bytes(); });
  auto json = nlohmann::ordered_json::object();
  if (!metadata.empty()) json["__metadata__"] = metadata;
  int64_t end = 0;
  for (const auto& tensor : tensors) {
    const int64_t size = tensor.dtype.bytes() * elements(tensor.sizes);
    // operator[] would look through all that are there.
    json.get_ref<nlohmann::ordered_json::object_t&>().emplace_back(
        tensor.name, nlohmann::ordered_json{{"dtype", tensor.dtype.name()},
                                            {"shape", tensor.sizes},
                                            {"data_offsets", {end, end + size}}});
    end += size;
  }
  std::string text;
  try {
    text = json.dump();
  } catch (const Json::exception& error) {
    throw CheckpointError(
        fmt::format("[checkpoint] a tensor's name is not UTF-8: {}", in_quotes(error.what())));
  }
  const auto length = static_cast<int64_t>(text.size()) + kLengthBytes;
  text.append((length + kAlignment - 1) / kAlignment * kAlignment - length, ' ');
  return text;
}

}  // namespace

std::optional<Dtype> Dtype::named(std::string_view name) {
  // F8, C64 and the unsigned ones are newer than the others.
  static constexpr std::pair<std::string_view, int64_t> kAll[] = {
      {"BOOL", 1},    {"U8", 1},          {"I8", 1},          {"F8_E5M2", 1}, {"F8_E4M3", 1},
      {"F8_E8M0", 1}, {"F8_E4M3FNUZ", 1}, {"F8_E5M2FNUZ", 1}, {"I16", 2},     {"U16", 2},
      {"F16", 2},     {"BF16", 2},        {"I32", 4},         {"U32", 4},     {"F32", 4},
      {"I64", 8},     {"U64", 8},         {"F64", 8},         {"C64", 8}};
  for (const auto& [known, bytes] : kAll) {
    if (known == name) return Dtype(known, bytes);
  }
  return std::nullopt;
}

SafetensorsHeader parse_safetensors(std::string_view bytes, int64_t file_bytes,
                                    std::string_view where) {
  const Complaint complain(where);
  if (static_cast<int64_t>(bytes.size()) < kLengthBytes) {
    complain("is {} bytes long, too short for a safetensors file", bytes.size());
  }
  const int64_t length = length_of(bytes);
  if (length < 0 || length > kMostHeaderBytes) {
    complain("is not a safetensors file: its header would have more than {} bytes",
             kMostHeaderBytes);
  }
  const int64_t begin = kLengthBytes + length;
  if (begin > static_cast<int64_t>(bytes.size())) {
    complain("is cut short: its header has {} bytes, and {} follow", length,
             bytes.size() - kLengthBytes);
  }
  const std::string_view written = bytes.substr(kLengthBytes, length);
  const Json json = parse_json(written, where, 3);
  // The parser takes a byte-order mark, and the text to end at a null byte.
  if (!json.is_object() || written.starts_with('\xef') || written.find('\0') != written.npos) {
    complain("has a header that is not a JSON object");
  }
  SafetensorsHeader header;
  for (const auto& [name, value] : json.items()) {
    if (name != "__metadata__") {
      header.tensors.emplace(name, tensor_from(name, value, complain));
      continue;
    }
    if (value.is_null()) continue;
    if (!value.is_object()) complain("has __metadata__ that is not an object");
    for (const auto& [key, text] : value.items()) {
      if (!text.is_string()) complain("has __metadata__ that holds not only strings");
      header.metadata[key] = text.get<std::string>();
    }
  }
  check_places(header, file_bytes - begin, complain);
  for (auto& [name, tensor] : header.tensors) {
    tensor.begin += begin;
    tensor.end += begin;
  }
  return header;
}

Safetensors::Safetensors(const std::string& path, FileSystem& files)
    : file_(files, path),
      header_(parse_safetensors(file_.bytes(), static_cast<int64_t>(file_.bytes().size()),
                                "[checkpoint] " + path)) {}

WrittenFile write_safetensors(const std::string& path, std::vector<TensorToWrite> tensors,
                              const std::map<std::string, std::string>& metadata,
                              FileSystem& files) {
  // Is still in a core's own cache when it is written, after two checksums.
  constexpr size_t kPiece = 256 << 10;
  for (const auto& tensor : tensors) {
    if (tensor.name == "__metadata__") {
      throw CheckpointError(fmt::format(
          "[checkpoint] {}: a tensor cannot be called __metadata__, which the format keeps for its "
          "own entry",
          path));
    }
  }
  const std::string header = header_of(tensors, metadata);
  if (static_cast<int64_t>(header.size()) > kMostHeaderBytes) {
    throw CheckpointError(fmt::format(
        "[checkpoint] {}: {} tensors need a header of {} bytes, and the format allows {}", path,
        tensors.size(), header.size(), kMostHeaderBytes));
  }
  OutputFile file(files, path);
  WrittenFile written;
  Checksum all;
  const auto put = [&](std::string_view bytes) {
    all.add(bytes);
    file.write(bytes);
    written.bytes += static_cast<int64_t>(bytes.size());
  };
  std::string begin(kLengthBytes, '\0');
  for (int i = 0; i < kLengthBytes; ++i) begin[i] = static_cast<char>(header.size() >> (8 * i));
  put(begin + header);
  for (const auto& tensor : tensors) {
    const std::string_view bytes = tensor.read ? tensor.read() : tensor.bytes;
    if (static_cast<int64_t>(bytes.size()) != tensor.dtype.bytes() * elements(tensor.sizes)) {
      throw CheckpointError(
          fmt::format("[checkpoint] {}: {} has {} bytes, which its shape and "
                      "dtype do not make",
                      path, in_quotes(tensor.name), bytes.size()));
    }
    Checksum own;
    for (size_t i = 0; i < bytes.size(); i += kPiece) {
      const auto piece = bytes.substr(i, kPiece);
      own.add(piece);
      put(piece);
    }
    if (!written.tensors.emplace(tensor.name, own.value()).second) {
      throw CheckpointError(
          fmt::format("[checkpoint] {}: {} comes twice", path, in_quotes(tensor.name)));
    }
  }
  file.finish();
  written.checksum = all.value();
  return written;
}

}  // namespace lockstep::checkpoint
