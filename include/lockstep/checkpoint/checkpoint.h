// One published checkpoint, to be read.
#pragma once

#include <map>
#include <string>
#include <string_view>
#include <vector>

#include "lockstep/checkpoint/file_system.h"
#include "lockstep/checkpoint/manifest.h"
#include "lockstep/checkpoint/safetensors.h"

namespace lockstep::checkpoint {

// Reads a checkpoint by memory map: nothing is read before it is asked for. For one thread at a
// time until prepare() was called for every file that is asked for; then for any number.
class Checkpoint {
 public:
  // `folder` is a checkpoint's own. Throws CheckpointError when the manifest is missing or damaged.
  explicit Checkpoint(std::string folder, FileSystem& files = system_files());

  // Where it is, and what it holds.
  const std::string& folder() const { return folder_; }
  const Manifest& manifest() const { return manifest_; }

  // Opens a file and compares it with the manifest: its length, and the shape and dtype of what it
  // holds. Throws CheckpointError, which names file and tensor.
  void prepare(const std::string& file);

  // The bytes of a tensor's box, row-major; valid as long as this. Opens the file. Does not look at
  // the checksum.
  std::string_view bytes(const std::string& tensor, const ManifestBox& box);

  // Throws CheckpointError, which names file and tensor, when the bytes do not have the box's
  // checksum.
  void check(const std::string& tensor, const ManifestBox& box);

 private:
  std::string folder_;
  FileSystem& files_;
  Manifest manifest_;
  std::map<std::string, Safetensors> open_;
};

// Everything that is wrong with a checkpoint: each file's length and checksum, each tensor's
// checksum, files that are missing or do not belong to it. Each finding names the file, and the
// tensors where it is theirs. Empty when it is whole. Reads all of it.
std::vector<std::string> verify(const std::string& folder, FileSystem& files = system_files());

}  // namespace lockstep::checkpoint
