// Named tensors in files of several formats: a checkpoint, safetensors, a Hugging Face folder,
// torch.save.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "lockstep/checkpoint/box.h"
#include "lockstep/checkpoint/file_system.h"
#include "lockstep/checkpoint/manifest.h"

namespace lockstep::checkpoint {

// A tensor, and where it lies.
struct StoredTensor {
  std::string dtype;  // as a manifest has it: "F32", "C128"
  Sizes sizes;
  // A box of it.
  struct Part {
    std::string file;   // its path within path()
    std::string entry;  // the name there
    Box box;
  };
  std::vector<Part> parts;
};

// Bytes of an element. Throws CheckpointError for a name that is not a dtype.
int64_t element_bytes(const std::string& dtype);
int64_t bytes_of(const StoredTensor& tensor);

// A tensor's bytes, row-major: in a file that is mapped, or put together in memory of its own.
class TensorBytes {
 public:
  // In a file.
  explicit TensorBytes(std::string_view mapped) : view_(mapped) {}
  // In `memory`, `count` bytes.
  TensorBytes(std::unique_ptr<char[]> memory, size_t count)
      : memory_(std::move(memory)), view_(memory_.get(), count) {}
  std::string_view view() const { return view_; }  // valid as long as this, and the files

 private:
  std::unique_ptr<char[]> memory_;
  std::string_view view_;
};

// What open_tensors() opens. For one thread at a time.
class TensorFiles {
 public:
  virtual ~TensorFiles() = default;

  const std::string& path() const { return path_; }  // a file, or a folder
  const std::string& kind() const { return kind_; }  // "checkpoint", "safetensors file"
  // By name, each tensor once.
  const std::map<std::string, StoredTensor>& tensors() const { return tensors_; }
  // Another name of a tensor, and its name in tensors().
  const std::map<std::string, std::string>& aliases() const { return aliases_; }
  // Numbers and texts beside them.
  const Values& values() const { return values_; }
  // The metadata of safetensors files: strings by name.
  const std::map<std::string, std::string>& metadata() const { return metadata_; }
  const std::map<std::string, int64_t>& files() const { return files_; }  // and their bytes
  // The manifest of a checkpoint; null for other files.
  virtual const Manifest* manifest() const { return nullptr; }

  // A tensor of tensors(). Its checksum is compared where the files have any. Throws
  // CheckpointError, which names file and tensor, when it is damaged or is none of tensors().
  virtual TensorBytes read(const std::string& name) = 0;

  // Everything that is wrong: each finding names the file, and the tensor where it is one's. Reads
  // all of it. Of files without checksums only the headers are checked.
  virtual std::vector<std::string> verify() = 0;

 protected:
  // Throws CheckpointError for a name that is none of tensors().
  void need(const std::string& name) const;
  // Fills in nothing but these.
  TensorFiles(std::string path, std::string kind)
      : path_(std::move(path)), kind_(std::move(kind)) {}

  std::string path_, kind_;
  std::map<std::string, StoredTensor> tensors_;
  std::map<std::string, std::string> aliases_;
  Values values_;
  std::map<std::string, std::string> metadata_;
  std::map<std::string, int64_t> files_;
};

// Opens what lies at `path`: a checkpoint, a directory of checkpoints (its newest), the folder of a
// run with such a directory `checkpoints` in it, a safetensors file, a folder of Hugging Face's (or
// its model.safetensors.index.json), a file of torch.save (of Python's since 1.6, or C++'s; nothing
// in it is executed: docs/checkpoints.md). Reads headers only. Throws CheckpointError that says
// what is there when that is none of these, or damaged.
std::unique_ptr<TensorFiles> open_tensors(const std::string& path,
                                          FileSystem& files = system_files());

// The directory of checkpoints in the folder of a run: `path` itself where it is one, or holds what
// can be opened otherwise; path + "/checkpoints" where that is one.
std::string checkpoints_of_run(const std::string& path, FileSystem& files = system_files());

// Whether a folder holds checkpoints, or would once a save into it has ended.
bool is_directory_of_checkpoints(const std::string& path, FileSystem& files = system_files());

// What is wrong in a directory of checkpoints.
struct DirectoryFindings {
  std::map<std::string, std::vector<std::string>> checkpoints;  // by name of the folder
  std::vector<std::string> directory;                           // about `latest`
  std::vector<std::string> unfinished;                          // saves that did not end: no fault
};

// Verifies all checkpoints of a directory, and that `latest` names the newest. A job may save there
// and remove older ones meanwhile: what it removes is left out, and is not a fault. Where `latest`
// names an older one, as between the two steps of a save, it is looked at for up to 2 s.
DirectoryFindings verify_directory(const std::string& path, FileSystem& files = system_files());

}  // namespace lockstep::checkpoint
