// Models and tensors in the files of other programs: safetensors, Hugging Face folders, Python's
// torch.save, archives of torch::save. docs/checkpoints.md says which files these are.
//
//   load_module(net, "model.safetensors");
//   load_module(net, "ddp.pt", {.prefix = "model.module."});
//   save_safetensors(net, "out.safetensors");
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "lockstep/checkpoint/error.h"
#include "lockstep/checkpoint/file_system.h"
#include "lockstep/checkpoint/manifest.h"
#include "lockstep/checkpoint/module_ref.h"

namespace lockstep::checkpoint {

// Options of load_module(). Patterns match the module's names as the shell's do ("encoder.*").
struct LoadOptions {
  // Only names that begin with it are read, without it: "module.", "net/".
  std::string prefix = "";
  std::vector<std::string> allow_missing = {};     // what the file does not have stays as it is
  std::vector<std::string> allow_unexpected = {};  // what the module does not have is left out
  // Other dtypes there are converted, as Tensor::copy_() does it: real numbers to complex ones of
  // the same sizes, too.
  std::vector<std::string> allow_conversion = {};
};

// What load_module() left out, and what stands beside the tensors: numbers, texts, metadata.
struct Loaded {
  std::vector<std::string> missing;
  std::vector<std::string> unexpected;
  Values values;  // of a nested dict "epoch", "args.lr"
  std::map<std::string, std::string> metadata;
};

// Reads parameters and buffers by the module's own names, from any file that open_tensors() opens
// (lockstep/checkpoint/tensor_files.h). Names of nested dicts are joined by dots. Communicates
// nothing: every rank calls it, or one before Ddp, which compares the ranks. Everything is verified
// before anything changes. Throws CheckpointError, and then nothing has changed, that lists all
// names that are missing or unexpected, or have another shape or dtype; and tied parameters that
// have different values there. One name of a tied parameter is enough.
Loaded load_module(const ModuleRef& module, const std::string& path,
                   const LoadOptions& options = {});

// The tensors of such a file by name, in memory of their own. Complex numbers of 128 bits come from
// safetensors as they are there, as F64 with a last dimension of 2.
std::map<std::string, at::Tensor> read_tensors(const std::string& path,
                                               const std::string& prefix = "");

// Options of save_safetensors().
struct SaveOptions {
  std::string prefix = "";  // before all names
  // The largest size of a file, when a folder is written.
  int64_t max_shard_bytes = 5'000'000'000;
  std::map<std::string, std::string> metadata = {{"format", "pt"}};
};

// Writes parameters and buffers: to one file when `path` ends with ".safetensors", otherwise to a
// folder as Hugging Face's libraries read it. Replaces what is there, which stays whole until
// all is written. A tied parameter is stored once; its other names are in the metadata, as
// safetensors.torch.save_model writes them. On one rank, since all ranks have the same. Throws
// CheckpointError when it fails, and for tensors that safetensors does not have: sparse, quantized.
void save_safetensors(const ModuleRef& module, const std::string& path,
                      const SaveOptions& options = {});

}  // namespace lockstep::checkpoint

namespace lockstep {
using checkpoint::load_module;
using checkpoint::read_tensors;
using checkpoint::save_safetensors;
}  // namespace lockstep
