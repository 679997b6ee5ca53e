#include "lockstep/checkpoint/tensor_files.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cerrno>

#include "checkpoint/format/directory/names.h"
#include "checkpoint/format/tensor_files/gather.h"
#include "checkpoint/format/tensor_files/tensor_kinds.h"
#include "lockstep/checkpoint/checkpoint.h"
#include "lockstep/checkpoint/directory.h"
#include "lockstep/checkpoint/error.h"

namespace lockstep::checkpoint {
namespace {

using Names = std::vector<std::string>;

bool has(const Names& names, std::string_view name) {
  return std::find(names.begin(), names.end(), name) != names.end();
}

template <class Test>
Names those(const Names& names, const Test& test) {
  Names found;
  std::copy_if(names.begin(), names.end(), std::back_inserter(found), test);
  return found;
}

class CheckpointFiles : public TensorFiles {
 public:
  CheckpointFiles(const std::string& folder, FileSystem& files)
      : TensorFiles(folder, "checkpoint"), system_(files), checkpoint_(folder, files) {
    const Manifest& manifest = checkpoint_.manifest();
    for (const auto& [name, tensor] : manifest.tensors) {
      StoredTensor stored{tensor.dtype, tensor.sizes, {}};
      for (const auto& box : tensor.boxes) stored.parts.push_back({box.file, box.entry, box.box});
      tensors_.emplace(name, std::move(stored));
    }
    aliases_ = manifest.aliases;
    values_ = manifest.values;
    for (const auto& [name, file] : manifest.files) files_[name] = file.bytes;
  }

  const Manifest* manifest() const override { return &checkpoint_.manifest(); }

  TensorBytes read(const std::string& name) override {
    need(name);
    const ManifestTensor& tensor = checkpoint_.manifest().tensors.at(name);
    for (const auto& box : tensor.boxes) checkpoint_.check(name, box);
    const int64_t count = bytes_of(tensors_.at(name));
    if (count == 0) return TensorBytes("");
    if (tensor.boxes.size() == 1) return TensorBytes(checkpoint_.bytes(name, tensor.boxes[0]));
    auto memory = std::make_unique_for_overwrite<char[]>(count);
    for (const auto& box : tensor.boxes) {
      if (elements(box.box.size) == 0) continue;
      put_box(tensor.sizes, box.box, element_bytes(tensor.dtype), checkpoint_.bytes(name, box),
              memory.get());
    }
    return {std::move(memory), static_cast<size_t>(count)};
  }

  std::vector<std::string> verify() override { return checkpoint::verify(path_, system_); }

 private:
  FileSystem& system_;
  Checkpoint checkpoint_;
};

class SafetensorsFile : public TensorFiles {
 public:
  SafetensorsFile(const std::string& path, FileSystem& files)
      : TensorFiles(path, "safetensors file"), file_(path, files) {
    const std::string name = path.substr(path.find_last_of('/') + 1);
    for (const auto& [entry, tensor] : file_.tensors()) {
      tensors_.emplace(entry, stored_whole(tensor, name, entry));
    }
    metadata_ = file_.metadata();
    aliases_ = aliases_in(metadata_, tensors_);
    files_[name] = static_cast<int64_t>(file_.all_bytes().size());
  }

  TensorBytes read(const std::string& name) override {
    need(name);
    return TensorBytes(file_.bytes(file_.tensors().at(name)));
  }
  std::vector<std::string> verify() override { return {}; }

 private:
  Safetensors file_;
};

// What was written by Python's distributed checkpoint.
[[noreturn]] void refuse_dcp(const std::string& path) {
  throw CheckpointError(fmt::format(
      "[checkpoint] {}: is of Python's distributed checkpoint (DCP), which is not read. Convert it "
      "there: python -m torch.distributed.checkpoint.format_utils dcp_to_torch FOLDER FILE",
      path));
}

std::unique_ptr<TensorFiles> open_folder(const std::string& folder, const Names& names,
                                         FileSystem& files) {
  const std::string name = folder.substr(folder.find_last_of('/') + 1);
  if (is_leftover(name)) {
    throw CheckpointError(fmt::format(
        "[checkpoint] {}: is a save that has not ended, or was interrupted: it was never published",
        folder));
  }
  if (has(names, kManifestName)) return open_checkpoint(folder, files);
  if (is_directory_of_checkpoints(folder, files)) {
    if (const auto newest = newest_checkpoint(folder, files)) {
      return open_checkpoint(*newest, files);
    }
    const auto unfinished = those(names, [](const auto& one) { return is_leftover(one); });
    throw CheckpointError(
        fmt::format("[checkpoint] {}: holds no published checkpoint{}", folder,
                    unfinished.empty() ? ""
                                       : fmt::format(", only what a save left that did not end: {}",
                                                     fmt::join(unfinished, ", "))));
  }
  // Without what an export that was killed has left.
  const auto ends_with = [&](std::string_view end) {
    return those(
        names, [&](const auto& one) { return one.ends_with(end) && !one.starts_with(kTemporary); });
  };
  if (has(names, ".metadata") || !ends_with(".distcp").empty()) refuse_dcp(folder);
  const auto indices = ends_with(kIndexEnd);
  if (indices.size() == 1) return open_index(folder + "/" + indices[0], files);
  const auto shards = ends_with(".safetensors");
  if (indices.empty() && has(shards, "model.safetensors")) {
    return open_safetensors(folder + "/model.safetensors", files);
  }
  if (indices.empty() && shards.size() == 1 && shards[0].find("-of-") == std::string::npos) {
    return open_safetensors(folder + "/" + shards[0], files);
  }
  if (!shards.empty() && indices.empty()) {
    throw CheckpointError(fmt::format(
        "[checkpoint] {}: has {} but neither manifest.json nor model.safetensors.index.json: it "
        "was not copied in full, or was never published",
        folder, fmt::join(shards, ", ")));
  }
  if (const auto own = checkpoints_of_run(folder, files); own != folder) {
    return open_tensors(own, files);
  }
  throw CheckpointError(fmt::format(
      "[checkpoint] {}: holds no checkpoint: neither manifest.json, nor folders step-..., nor a "
      "run's folder checkpoints, nor model.safetensors or its index",
      folder));
}

std::unique_ptr<TensorFiles> open_file(const std::string& path, FileSystem& files) {
  if (path.ends_with(fmt::format("/{}", kManifestName))) {
    return open_checkpoint(path.substr(0, path.size() - kManifestName.size() - 1), files);
  }
  if (path.ends_with(".index.json")) return open_index(path, files);
  if (path.ends_with(".distcp")) refuse_dcp(path);
  if (auto file = open_torch_file(path, files)) return file;
  return open_safetensors(path, files);
}

}  // namespace

std::map<std::string, std::string> aliases_in(const std::map<std::string, std::string>& metadata,
                                              const std::map<std::string, StoredTensor>& tensors) {
  std::map<std::string, std::string> aliases;
  for (const auto& [name, target] : metadata) {
    // The standard entry for the framework that wrote the file ("pt"), never a tied name.
    if (name == "format") continue;
    if (!tensors.contains(name) && tensors.contains(target)) aliases[name] = target;
  }
  return aliases;
}

StoredTensor stored_whole(const FileTensor& tensor, const std::string& file,
                          const std::string& entry) {
  return {tensor.dtype.name(), tensor.sizes, {{file, entry, whole(tensor.sizes)}}};
}

std::unique_ptr<TensorFiles> open_checkpoint(const std::string& folder, FileSystem& files) {
  return std::make_unique<CheckpointFiles>(folder, files);
}

std::unique_ptr<TensorFiles> open_safetensors(const std::string& path, FileSystem& files) {
  return std::make_unique<SafetensorsFile>(path, files);
}

bool is_directory_of_checkpoints(const std::string& path, FileSystem& files) {
  const auto names = files.list(path);
  return names && !has(*names, kManifestName) &&
         std::any_of(names->begin(), names->end(), [&](const std::string& name) {
           return name.starts_with(kStep) || is_leftover(name) || name == kLockName ||
                  name == kLatestName;
         });
}

std::string checkpoints_of_run(const std::string& path, FileSystem& files) {
  const std::string own = path + (path.ends_with('/') ? "checkpoints" : "/checkpoints");
  const auto names = files.list(path);
  const bool holds_others =
      names && std::any_of(names->begin(), names->end(), [](const std::string& name) {
        return name == kManifestName || name.ends_with(kIndexEnd) || name.ends_with(".safetensors");
      });
  if (holds_others || is_directory_of_checkpoints(path, files)) return path;
  return is_directory_of_checkpoints(own, files) ? own : path;
}

std::unique_ptr<TensorFiles> open_tensors(const std::string& path, FileSystem& files) {
  std::string plain = path;
  while (plain.size() > 1 && plain.back() == '/') plain.pop_back();
  const auto names = files.list(plain);
  if (names) return open_folder(plain, *names, files);
  if (errno == ENOTDIR) return open_file(plain, files);
  throw_system_error(plain, "cannot be opened");
}

}  // namespace lockstep::checkpoint
