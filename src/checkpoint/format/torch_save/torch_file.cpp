// Files of Python's torch.save since 1.6, and of C++'s: zip archives with a pickle that describes
// tensors in the other records. Nothing is executed.
#include <fmt/format.h>

#include <algorithm>
#include <optional>
#include <set>
#include <tuple>

#include "checkpoint/format/json.h"
#include "checkpoint/format/tensor_files/gather.h"
#include "checkpoint/format/tensor_files/tensor_kinds.h"
#include "checkpoint/format/torch_save/pickle.h"
#include "checkpoint/format/torch_save/zip.h"
#include "lockstep/checkpoint/error.h"

namespace lockstep::checkpoint {
namespace {

constexpr int kMostLevels = 64;
constexpr size_t kMostNameBytes = 4096;
constexpr int64_t kMostExpansion = 1024, kFreelyExpanded = 1 << 30;

class TorchFile : public TensorFiles {
 public:
  // `mapped` has the bytes, or others keep them.
  TorchFile(const std::string& path, std::string_view bytes, std::string_view where,
            std::optional<MappedFile> mapped)
      : TensorFiles(path, "torch.save file"),
        mapped_(std::move(mapped)),
        where_(where),
        name_(path.substr(path.find_last_of('/') + 1)),
        records_(parse_zip(bytes, where)),
        folder_(folder()) {
    for (const auto& [record, stored] : records_)
      has_checksums_ = has_checksums_ || stored.crc != 0;
    if (const auto order = records_.find(folder_ + "byteorder"); order != records_.end()) {
      check(order->first);
      if (order->second.bytes != "little") {
        complain(
            fmt::format("was written on a machine of byte order {}, which is not read: save it "
                        "again on one that is little-endian",
                        in_quotes(order->second.bytes)));
      }
    }
    const std::string record = folder_ + "data.pkl";
    check(record);
    const Pickle pickle(records_.at(record).bytes, fmt::format("{}: {}", where_, record));
    visits_left_ = 100'000 + 4 * records_.at(record).bytes.size();
    name_bytes_left_ = 16'000'000 + 64 * records_.at(record).bytes.size();
    add(pickle.root(), "", 0);
    files_[name_] = static_cast<int64_t>(bytes.size());
  }

  TensorBytes read(const std::string& name) override {
    need(name);
    const StoredTensor& stored = tensors_.at(name);
    const PickledTensor& tensor = places_.at(name);
    const int64_t count = bytes_of(stored), width = element_bytes(stored.dtype);
    if (count == 0) return TensorBytes("");
    check(record_of(tensor));
    const auto bytes = records_.at(record_of(tensor)).bytes.substr(tensor.offset * width);
    if (tensor.strides == row_major(tensor.sizes)) return TensorBytes(bytes.substr(0, count));
    if (count > kFreelyExpanded && count / kMostExpansion > static_cast<int64_t>(bytes.size())) {
      complain(
          fmt::format("tensor {} is {} bytes of the file expanded to {}: save a contiguous one",
                      in_quotes(name), bytes.size(), count));
    }
    auto memory = std::make_unique_for_overwrite<char[]>(count);
    gather(tensor.sizes, tensor.strides, width, bytes.data(), memory.get());
    return {std::move(memory), static_cast<size_t>(count)};
  }

  std::vector<std::string> verify() override {
    std::vector<std::string> findings;
    for (const auto& [record, stored] : records_) {
      if (stored.compressed) continue;  // TorchScript's code
      try {
        check(record);
      } catch (const CheckpointError& error) {
        findings.emplace_back(error.what());
      }
    }
    return findings;
  }

 private:
  [[noreturn]] void complain(const std::string& text) const {
    throw CheckpointError(fmt::format("{}: {}", where_, text));
  }

  // All records lie in one folder, of any name.
  std::string folder() const {
    constexpr std::string_view kPickle = "data.pkl";
    std::optional<std::string> found;
    for (const auto& [record, stored] : records_) {
      const size_t slash = record.find('/');
      if (slash == std::string::npos || record.substr(slash + 1) != kPickle) continue;
      if (found) complain("holds several data.pkl");
      found = record.substr(0, slash + 1);
    }
    if (!found) complain("is a zip archive without a data.pkl: not of torch.save");
    return *found;
  }

  std::string record_of(const PickledTensor& tensor) const {
    return fmt::format("{}data/{}", folder_, tensor.storage);
  }

  // Compares the CRC-32, once. Python may be told to write none (set_crc32_options(False)).
  void check(const std::string& record) {
    const ZipRecord& stored = records_.at(record);
    if (stored.compressed) {
      complain(fmt::format("record {} is compressed; torch.save stores them as they are",
                           in_quotes(record)));
    }
    if (!has_checksums_ || !checked_.insert(record).second) return;
    if (crc32_of(stored.bytes) == stored.crc) return;
    checked_.erase(record);
    std::string of;
    for (const auto& [name, tensor] : places_) {
      if (record_of(tensor) == record) of += (of.empty() ? " of " : ", ") + in_quotes(name);
    }
    complain(
        fmt::format("record {}{} is damaged: it does not have the CRC-32 that the archive says",
                    in_quotes(record), of));
  }

  // What is below `name`.
  void add(const PickledValue& value, const std::string& name, int level) {
    if (level > kMostLevels) complain(fmt::format("is nested deeper than {} levels", kMostLevels));
    if (name.size() > kMostNameBytes || name.size() > name_bytes_left_) {
      complain("has names that are too long");
    }
    name_bytes_left_ -= name.size();
    if (visits_left_-- == 0) complain("refers to its parts too often");
    switch (value.kind) {
      case PickledValue::None:
        return;
      case PickledValue::Bool:
        return put(name, value.integer != 0);
      case PickledValue::Int:
        return put(name, value.integer);
      case PickledValue::Float:
        return put(name, value.real);
      case PickledValue::Text:
      case PickledValue::Name:
        return put(name, value.text);
      case PickledValue::Tensor:
        return put_tensor(name, *value.tensor);
      case PickledValue::Storage:
        complain(
            fmt::format("{} is a storage without a tensor, which is not read", in_quotes(name)));
      case PickledValue::List:
        for (size_t i = 0; i < value.items.size(); ++i) {
          add(*value.items[i], below(name, std::to_string(i)), level + 1);
        }
        return;
      case PickledValue::Dict:
        for (size_t i = 0; i < value.items.size(); i += 2) {
          add(*value.items[i + 1], below(name, key_of(*value.items[i], name)), level + 1);
        }
    }
  }

  static std::string below(const std::string& name, const std::string& key) {
    return name.empty() ? key : name + "." + key;
  }

  std::string key_of(const PickledValue& key, const std::string& name) const {
    if (key.kind == PickledValue::Text) return key.text;
    if (key.kind != PickledValue::Int) {
      complain(fmt::format("{} is a dict with a key that is neither a text nor a whole number",
                           in_quotes(name)));
    }
    return std::to_string(key.integer);
  }

  // Other things may have the same name only by a dict's names with dots in them.
  void claim(const std::string& name) {
    if (!names_.insert(name).second)
      complain(fmt::format("two entries are called {}", in_quotes(name)));
  }
  void put(const std::string& name, checkpoint::Value value) {
    claim(name);
    values_.emplace(name, std::move(value));
  }

  void put_tensor(const std::string& name, const PickledTensor& tensor) {
    claim(name);
    check_place(name, tensor);
    const auto same =
        std::tuple(tensor.storage, tensor.offset, tensor.dtype, tensor.sizes, tensor.strides);
    const auto [first, fresh] = by_place_.try_emplace(same, name);
    if (!fresh && elements(tensor.sizes) > 0) {
      aliases_[name] = first->second;
      return;
    }
    tensors_[name] = {
        tensor.dtype, tensor.sizes, {{name_, record_of(tensor), whole(tensor.sizes)}}};
    places_[name] = tensor;
  }

  // All elements lie in the storage.
  void check_place(const std::string& name, const PickledTensor& tensor) const {
    const auto wrong = [&](const std::string& text) {
      complain(fmt::format("tensor {} {}", in_quotes(name), text));
    };
    const int64_t width = element_bytes(tensor.dtype);
    int64_t bytes = width, last = tensor.offset;
    const bool empty = std::count(tensor.sizes.begin(), tensor.sizes.end(), 0) > 0;
    bool overflow = false;
    for (size_t d = 0; d < tensor.sizes.size(); ++d) {
      int64_t reach = 0;
      overflow = __builtin_mul_overflow(bytes, tensor.sizes[d], &bytes) || overflow;
      overflow =
          (!empty && (__builtin_mul_overflow(tensor.sizes[d] - 1, tensor.strides[d], &reach) ||
                      __builtin_add_overflow(last, reach, &last))) ||
          overflow;
    }
    if (overflow) wrong("has more bytes than 64 bits count");
    if (empty) return;  // its record may be missing
    const auto record = records_.find(record_of(tensor));
    if (record == records_.end()) {
      wrong(fmt::format("is in record {}, which is not there", in_quotes(record_of(tensor))));
    }
    const auto stored = static_cast<int64_t>(record->second.bytes.size());
    if (last >= stored / width) {
      wrong(fmt::format("reaches element {} of record {}, which has {}", last,
                        in_quotes(record->first), stored / width));
    }
  }

  const std::optional<MappedFile> mapped_;
  const std::string where_, name_;
  const std::map<std::string, ZipRecord> records_;
  const std::string folder_;
  bool has_checksums_ = false;
  std::set<std::string> checked_;
  size_t visits_left_ = 0, name_bytes_left_ = 0;  // a short pickle may stand for very many
  std::set<std::string> names_;
  std::map<std::tuple<std::string, int64_t, std::string, Sizes, Sizes>, std::string> by_place_;
  std::map<std::string, PickledTensor> places_;
};

// The first bytes of what torch.save wrote before 1.6: a pickle of its magic number.
constexpr std::string_view kLegacy = "\x80\x02\x8a\x0a\x6c\xfc\x9c\x46\xf9\x20\x6a\xa8\x50\x19\x2e";

}  // namespace

std::unique_ptr<TensorFiles> parse_torch_file(std::string_view bytes, std::string_view where) {
  return std::make_unique<TorchFile>("memory", bytes, where, std::nullopt);
}

std::unique_ptr<TensorFiles> open_torch_file(const std::string& path, FileSystem& files) {
  MappedFile mapped(files, path);
  const auto bytes = mapped.bytes();
  const std::string where = "[checkpoint] " + path;
  if (bytes.starts_with("PK"))
    return std::make_unique<TorchFile>(path, bytes, where, std::move(mapped));
  const auto refuse = [&](const char* text) { throw CheckpointError(where + text); };
  if (bytes.starts_with(kLegacy) || bytes.substr(0, 300).find("ustar") != std::string_view::npos) {
    refuse(
        ": is in the format that torch.save wrote before 1.6 (legacy, no zip archive), which is "
        "not read: save it "
        "again with a newer one, torch.save(torch.load(FILE), FILE)");
  }
  if (bytes.size() > 1 && bytes[0] == '\x80' && bytes[1] >= 2 && bytes[1] <= 5) {
    refuse(": is a Python pickle, but not a file of torch.save");
  }
  return nullptr;
}

}  // namespace lockstep::checkpoint
