// Tensors of files, written as plain safetensors.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "lockstep/checkpoint/safetensors.h"
#include "lockstep/checkpoint/tensor_files.h"

namespace lockstep::checkpoint {

// Tensors chosen by patterns. "net" is everything below "net/" or "net.", called without that;
// a pattern as the shell's ("net/fc*", "*.bias") is what it matches, by its full name.
struct Selected {
  std::map<std::string, std::string> tensors;  // name: the name in TensorFiles::tensors()
  std::map<std::string, std::string> aliases;  // name: the name in `tensors`
};
// All for no patterns. Throws CheckpointError when a pattern chooses nothing, or two tensors would
// have one name.
Selected select(const TensorFiles& files, const std::vector<std::string>& patterns);

// What names begin with, and what they are to begin with instead. "net" is the name net, and all
// that is below "net/" or "net."; "net/" is what is below it, without the "/".
struct Renaming {
  std::string from, to;
};
// The same tensors, each renamed by the first that fits it. Throws CheckpointError for a renaming
// that fits none, one that leaves no name, and two tensors of one name.
Selected renamed(const Selected& selected, const std::vector<Renaming>& renamings);

// Options of write_folder().
struct FolderOptions {
  int64_t max_shard_bytes = 5'000'000'000;  // as Hugging Face's libraries have it
  std::map<std::string, std::string> metadata = {};
};

// What to do with a file of the same name: an error, or it is replaced.
enum class Existing { Error, Replace };

// Writes one file under a name of its own first (.tmp-9c41b7e20d5fa863-NAME, which stays when the
// process is killed), so that `path` is whole or as it was; of several exports to it at once,
// one's. Throws CheckpointError when that fails, and for a device, pipe or socket, which stays.
void write_file(const std::string& path, std::vector<TensorToWrite> tensors,
                const std::map<std::string, std::string>& metadata, Existing existing,
                FileSystem& files = system_files());

// Writes a folder as Hugging Face's libraries do: model.safetensors, or, when that would be larger
// than a shard may be, model-00001-of-00003.safetensors ... and model.safetensors.index.json. A
// tensor that is larger has a shard of its own. Makes the folder; the index (or the only file)
// comes last. With Existing::Replace, an earlier folder stays whole until all files of this one are
// written (which takes room for both); then it cannot be read until they have taken its place, and
// none of its files is left. One process at a time: it removes what one that was killed has left.
void write_folder(const std::string& folder, std::vector<TensorToWrite> tensors,
                  const FolderOptions& options, Existing existing,
                  FileSystem& files = system_files());

// What to write of a selection, read when it is written. Aliases become metadata, as
// safetensors.torch.save_model writes them. C128 is written as F64 with a last dimension of 2,
// since safetensors has no such dtype. With `dtype` (F64, F32, F16 or BF16) tensors of these four
// are converted to it when they are read, rounded as at::Tensor::to(); a finite number that would
// become infinite is a CheckpointError then, which names the tensor. `files` has to outlive the
// result.
std::vector<TensorToWrite> to_write(TensorFiles& files, const Selected& selected,
                                    const std::optional<Dtype>& dtype = std::nullopt);

}  // namespace lockstep::checkpoint
