// What a checkpoint holds, and in which file. docs/checkpoint_format.md has the file itself.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

#include "lockstep/checkpoint/box.h"

namespace lockstep::checkpoint {

// A number, a string or a list, for example a learning rate or a step. Doubles come back with the
// same bits (but for a NaN's).
using Value =
    std::variant<bool, int64_t, double, std::string, std::vector<int64_t>, std::vector<double>>;
// Values by name.
using Values = std::map<std::string, Value>;

// A file of a checkpoint.
struct ManifestFile {
  int64_t bytes = 0;
  uint64_t checksum = 0;  // XXH3-64
};

// Where the elements of a box lie.
struct ManifestBox {
  Box box;
  std::string file;
  std::string entry;      // the name in that file
  uint64_t checksum = 0;  // XXH3-64 of its bytes
};

// A tensor of a checkpoint, whole.
struct ManifestTensor {
  // The dtype's name in safetensors; C64 and C128 stand in the files as F32 and F64 with a last
  // dimension of 2.
  std::string dtype;
  Sizes sizes;
  std::vector<ManifestBox> boxes;  // each element once
};

// All that a checkpoint holds.
struct Manifest {
  int64_t step = 0;
  // Counts the saves into a directory, independently of their steps.
  int64_t save = 0;
  int64_t world = 1;  // ranks that saved
  std::map<std::string, double> metrics = {};
  Values values = {};
  // Another name of a tensor, and its name in `tensors`.
  std::map<std::string, std::string> aliases = {};
  std::map<std::string, ManifestFile> files = {};
  std::map<std::string, ManifestTensor> tensors = {};
};

// The version of the format that this library writes.
inline constexpr int kManifestVersion = 1;

// The file's bytes. Throws CheckpointError for a text that is not UTF-8.
std::string to_json(const Manifest& manifest);

// Throws CheckpointError that begins with `where` for a file that is of another version, damaged
// (its checksum) or contradicts itself: a tensor whose boxes do not cover it once, files that are
// not listed or lie elsewhere.
Manifest manifest_from(std::string_view text, std::string_view where);
// Step, save, world and metrics alone: of the rest, only the checksum is computed.
// Throws as above, but for what contradicts itself in the rest.
Manifest manifest_head_from(std::string_view text, std::string_view where);

}  // namespace lockstep::checkpoint
