// The kinds of files that open_tensors() opens.
#pragma once

#include "lockstep/checkpoint/safetensors.h"
#include "lockstep/checkpoint/tensor_files.h"

namespace lockstep::checkpoint {

inline constexpr std::string_view kIndexEnd = ".safetensors.index.json";

std::unique_ptr<TensorFiles> open_checkpoint(const std::string& folder, FileSystem& files);
std::unique_ptr<TensorFiles> open_safetensors(const std::string& path, FileSystem& files);
// An index of safetensors files beside it.
std::unique_ptr<TensorFiles> open_index(const std::string& path, FileSystem& files);
// A file of torch.save; null for what cannot be one.
std::unique_ptr<TensorFiles> open_torch_file(const std::string& path, FileSystem& files);
// The same of bytes, which have to outlive it. Messages begin with `where`.
std::unique_ptr<TensorFiles> parse_torch_file(std::string_view bytes, std::string_view where);

StoredTensor stored_whole(const FileTensor& tensor, const std::string& file,
                          const std::string& entry);

// What safetensors.torch.save_model writes for tied tensors: names that are not stored, and the
// stored name of each.
std::map<std::string, std::string> aliases_in(const std::map<std::string, std::string>& metadata,
                                              const std::map<std::string, StoredTensor>& tensors);

}  // namespace lockstep::checkpoint
