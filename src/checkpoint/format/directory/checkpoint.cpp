#include "lockstep/checkpoint/checkpoint.h"

#include <fmt/format.h>

#include "checkpoint/format/checksum.h"
#include "checkpoint/format/directory/names.h"
#include "checkpoint/format/json.h"
#include "lockstep/checkpoint/error.h"

namespace lockstep::checkpoint {
namespace {

Manifest read_manifest(FileSystem& files, const std::string& folder) {
  const std::string path = fmt::format("{}/{}", folder, kManifestName);
  const MappedFile file(files, path);
  return manifest_from(file.bytes(), "[checkpoint] " + path);
}

// What a box of a tensor is in the file.
bool is_stored_as(const ManifestTensor& tensor, const ManifestBox& box, const FileTensor& stored) {
  const bool complex = tensor.dtype == "C64" || tensor.dtype == "C128";
  Sizes sizes = box.box.size;
  if (complex) sizes.push_back(2);
  const std::string dtype = !complex ? tensor.dtype : tensor.dtype == "C64" ? "F32" : "F64";
  return stored.sizes == sizes && stored.dtype.name() == dtype;
}

}  // namespace

Checkpoint::Checkpoint(std::string folder, FileSystem& files)
    : folder_(std::move(folder)), files_(files), manifest_(read_manifest(files, folder_)) {}

void Checkpoint::prepare(const std::string& file) {
  if (open_.contains(file)) return;
  const std::string path = folder_ + "/" + file;
  const int64_t expected = manifest_.files.at(file).bytes;
  {
    // Its length first: it says more than what the header makes of it.
    const MappedFile mapped(files_, path);
    const auto bytes = static_cast<int64_t>(mapped.bytes().size());
    if (bytes != expected) {
      throw CheckpointError(fmt::format(
          "[checkpoint] {}: has {} bytes, and the manifest says {}: it is {}", path, bytes,
          expected, bytes < expected ? "cut short" : "longer than it was written"));
    }
  }
  open_.try_emplace(file, path, files_);
}

std::string_view Checkpoint::bytes(const std::string& tensor, const ManifestBox& box) {
  prepare(box.file);
  const Safetensors& file = open_.at(box.file);
  const auto entry = file.tensors().find(box.entry);
  if (entry == file.tensors().end() ||
      !is_stored_as(manifest_.tensors.at(tensor), box, entry->second)) {
    throw CheckpointError(fmt::format(
        "[checkpoint] {}/{}: {} of tensor {} is {} there, the file is damaged or of another "
        "checkpoint",
        folder_, box.file, in_quotes(box.entry), in_quotes(tensor),
        entry == file.tensors().end() ? "not" : "with another shape or dtype"));
  }
  return file.bytes(entry->second);
}

void Checkpoint::check(const std::string& tensor, const ManifestBox& box) {
  if (checksum(bytes(tensor, box)) == box.checksum) return;
  throw CheckpointError(fmt::format(
      "[checkpoint] {}/{}: tensor {} is damaged: the bytes of {} do not have the checksum that the "
      "manifest says. Restore another checkpoint, or copy the file again",
      folder_, box.file, in_quotes(tensor), in_quotes(box.entry)));
}

std::vector<std::string> verify(const std::string& folder, FileSystem& files) {
  std::vector<std::string> findings;
  const auto find = [&](const auto& look) {
    try {
      look();
      return true;
    } catch (const CheckpointError& error) {
      findings.emplace_back(error.what());
      return false;
    }
  };
  std::optional<Checkpoint> checkpoint;
  if (!find([&] { checkpoint.emplace(folder, files); })) return findings;
  const Manifest& manifest = checkpoint->manifest();
  std::map<std::string, size_t> damaged;  // files, with their tensors that are
  for (const auto& [name, tensor] : manifest.tensors) {
    for (const auto& box : tensor.boxes) {
      if (damaged.contains(box.file) && damaged[box.file] == 0) continue;  // cannot be opened
      if (!find([&] { checkpoint->prepare(box.file); })) {
        damaged[box.file] = 0;
        continue;
      }
      if (!find([&] { checkpoint->check(name, box); })) ++damaged[box.file];
    }
  }
  for (const auto& [name, file] : manifest.files) {
    if (damaged.contains(name)) continue;
    const std::string path = folder + "/" + name;
    find([&] {
      const MappedFile mapped(files, path);
      if (static_cast<int64_t>(mapped.bytes().size()) == file.bytes &&
          checksum(mapped.bytes()) == file.checksum) {
        return;
      }
      throw CheckpointError(fmt::format(
          "[checkpoint] {}: is damaged outside of its tensors, in the header: it has {} bytes and "
          "not the checksum that the manifest says",
          path, mapped.bytes().size()));
    });
  }
  find([&] {
    for (const auto& name : names_in(files, folder)) {
      if (name != kManifestName && !manifest.files.contains(name)) {
        findings.push_back(
            fmt::format("[checkpoint] {}/{}: is not of this checkpoint", folder, name));
      }
    }
  });
  return findings;
}

}  // namespace lockstep::checkpoint
