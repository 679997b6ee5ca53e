// Folders of Hugging Face's: safetensors files, and an index that says which tensor is in which.
#include <fmt/format.h>

#include "checkpoint/format/json.h"
#include "checkpoint/format/tensor_files/tensor_kinds.h"
#include "lockstep/checkpoint/error.h"

namespace lockstep::checkpoint {
namespace {

constexpr int64_t kMostIndexBytes = 100'000'000;

[[noreturn]] void complain(const std::string& path, const std::string& text) {
  throw CheckpointError(fmt::format("[checkpoint] {}: {}", path, text));
}

class IndexedFiles : public TensorFiles {
 public:
  IndexedFiles(const std::string& path, FileSystem& files)
      : TensorFiles(folder_of(path), "safetensors folder") {
    const Json index = read(path, files);
    for (const auto& [name, file] : index["weight_map"].items()) add(path, name, file, files);
    aliases_ = aliases_in(metadata_, tensors_);
    find_unlisted(path);
  }

  TensorBytes read(const std::string& name) override {
    need(name);
    const Safetensors& file = open_.at(tensors_.at(name).parts[0].file);
    return TensorBytes(file.bytes(file.tensors().at(name)));
  }
  std::vector<std::string> verify() override { return {}; }

 private:
  static std::string folder_of(const std::string& path) {
    const size_t slash = path.find_last_of('/');
    return slash == std::string::npos ? "." : path.substr(0, slash);
  }

  static Json read(const std::string& path, FileSystem& files) {
    const MappedFile file(files, path);
    if (static_cast<int64_t>(file.bytes().size()) > kMostIndexBytes) {
      complain(path, fmt::format("has more than {} bytes", kMostIndexBytes));
    }
    Json json = parse_json(file.bytes(), "[checkpoint] " + path, 8);
    if (!json.is_object() || !json.contains("weight_map") || !json["weight_map"].is_object()) {
      complain(path, "has no weight_map, which names the file of each tensor");
    }
    return json;
  }

  void add(const std::string& path, const std::string& name, const Json& json, FileSystem& files) {
    const std::string file = json.is_string() ? json.get<std::string>() : "";
    if (file.empty() || file.front() == '.' || file.find('/') != std::string::npos ||
        file.find('\0') != std::string::npos) {
      complain(path,
               fmt::format("says that {} is in file {}, which is not the name of a file beside it",
                           in_quotes(name), in_quotes(json.dump(-1, ' ', true))));
    }
    if (!open_.contains(file)) open(file, files);
    const auto found = open_.at(file).tensors().find(name);
    if (found == open_.at(file).tensors().end()) {
      complain(path, fmt::format("says that {} is in {}, and it is not: the files do not belong "
                                 "together",
                                 in_quotes(name), in_quotes(file)));
    }
    tensors_.emplace(name, stored_whole(found->second, file, name));
  }

  void open(const std::string& file, FileSystem& files) {
    const auto& opened = open_.try_emplace(file, path_ + "/" + file, files).first->second;
    files_[file] = static_cast<int64_t>(opened.all_bytes().size());
    for (const auto& [key, value] : opened.metadata()) metadata_.emplace(key, value);
  }

  void find_unlisted(const std::string& path) const {
    for (const auto& [file, opened] : open_) {
      for (const auto& [name, tensor] : opened.tensors()) {
        const auto listed = tensors_.find(name);
        if (listed == tensors_.end() || listed->second.parts[0].file != file) {
          complain(path,
                   fmt::format("does not say that {} is in {}: the files do not belong together",
                               in_quotes(name), in_quotes(file)));
        }
      }
    }
  }

  std::map<std::string, Safetensors> open_;
};

}  // namespace

std::unique_ptr<TensorFiles> open_index(const std::string& path, FileSystem& files) {
  return std::make_unique<IndexedFiles>(path, files);
}

}  // namespace lockstep::checkpoint
