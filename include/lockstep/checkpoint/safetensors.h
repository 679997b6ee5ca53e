// Files of named tensors (https://github.com/huggingface/safetensors), as Python's `safetensors`
// reads and writes them.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "lockstep/checkpoint/box.h"
#include "lockstep/checkpoint/file_system.h"

namespace lockstep::checkpoint {

// What elements are, by the format's own name: "F32", "BF16", "I64", "BOOL".
class Dtype {
 public:
  // Nothing for a name that the format does not have.
  static std::optional<Dtype> named(std::string_view name);

  // The format's own name.
  const std::string& name() const { return name_; }
  int64_t bytes() const { return bytes_; }  // of an element
  bool operator==(const Dtype&) const = default;

 private:
  Dtype(std::string_view name, int64_t bytes) : name_(name), bytes_(bytes) {}
  std::string name_;
  int64_t bytes_;
};

// A tensor in a file.
struct FileTensor {
  Dtype dtype;
  Sizes sizes;
  int64_t begin = 0;  // its bytes in the file, row-major and little-endian
  int64_t end = 0;
};

// What a file's header says.
struct SafetensorsHeader {
  std::map<std::string, FileTensor> tensors;
  std::map<std::string, std::string> metadata;
};

// Parses the header of a file that is `file_bytes` long and begins with `bytes` (8 bytes of length
// and the header at least). Throws CheckpointError that begins with `where` for anything that the
// format does not allow: lengths and offsets that lie outside the file, overlap or leave holes,
// sizes that do not give the length, names that come twice, more than 100 MB of header.
SafetensorsHeader parse_safetensors(std::string_view bytes, int64_t file_bytes,
                                    std::string_view where);

// A file that is read, by memory map: opening it reads the header only.
class Safetensors {
 public:
  // Opens the file. Throws CheckpointError when it cannot be read or is damaged.
  explicit Safetensors(const std::string& path, FileSystem& files = system_files());

  // What the header says.
  const std::map<std::string, FileTensor>& tensors() const { return header_.tensors; }
  const std::map<std::string, std::string>& metadata() const { return header_.metadata; }
  // Valid as long as this.
  std::string_view bytes(const FileTensor& tensor) const {
    return file_.bytes().substr(static_cast<size_t>(tensor.begin),
                                static_cast<size_t>(tensor.end - tensor.begin));
  }
  // The whole file.
  std::string_view all_bytes() const { return file_.bytes(); }

 private:
  MappedFile file_;
  SafetensorsHeader header_;
};

// A tensor to be written: contiguous memory, that stays as it is until the file is written.
struct TensorToWrite {
  std::string name;
  Dtype dtype;
  Sizes sizes;
  std::string_view bytes;
  // Where there is one it gives the bytes, valid until the next tensor is asked: so that not all of
  // them need memory at once.
  std::function<std::string_view()> read = nullptr;
};

// What was written.
struct WrittenFile {
  int64_t bytes = 0;
  uint64_t checksum = 0;                    // XXH3-64 of the file
  std::map<std::string, uint64_t> tensors;  // and of each tensor's bytes, by name
};

// Writes `path`, brings it to the disk, and says what was written. Tensors of wider elements come
// first, so that each begins at a multiple of its element; the first at one of 64 bytes. Throws
// CheckpointError when that fails (a part of the file may be there then), and for a name that comes
// twice.
WrittenFile write_safetensors(const std::string& path, std::vector<TensorToWrite> tensors,
                              const std::map<std::string, std::string>& metadata = {},
                              FileSystem& files = system_files());

}  // namespace lockstep::checkpoint
