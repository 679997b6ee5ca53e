#include "lockstep/checkpoint/export.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <fnmatch.h>

#include <algorithm>
#include <cerrno>
#include <optional>
#include <set>

#include "checkpoint/format/conversion.h"
#include "checkpoint/format/directory/names.h"
#include "checkpoint/format/json.h"
#include "checkpoint/format/tensor_files/tensor_kinds.h"
#include "core/files/whole_file.h"
#include "lockstep/checkpoint/error.h"

namespace lockstep::checkpoint {
namespace {

bool is_pattern(const std::string& text) { return text.find_first_of("*?[") != std::string::npos; }

// The name that a pattern gives to what it chooses. A file of torch.save(tensor) has one tensor,
// whose name is empty.
std::optional<std::string> chosen_name(const std::string& name, const std::string& pattern) {
  if (name == pattern) return name;
  if (is_pattern(pattern)) {
    return fnmatch(pattern.c_str(), name.c_str(), 0) == 0 ? std::optional(name) : std::nullopt;
  }
  if (!name.starts_with(pattern)) return std::nullopt;
  const std::string rest = name.substr(pattern.size());
  const bool is_prefix_whole = pattern.ends_with('/') || pattern.ends_with('.');
  if (is_prefix_whole) return rest;
  return rest.front() == '/' || rest.front() == '.' ? std::optional(rest.substr(1)) : std::nullopt;
}

std::optional<std::string> chosen_name(const std::string& name,
                                       const std::vector<std::string>& patterns) {
  for (const auto& pattern : patterns) {
    if (auto chosen = chosen_name(name, pattern)) return chosen;
  }
  return patterns.empty() ? std::optional(name) : std::nullopt;
}

// model-00001-of-00003.safetensors
std::string shard_name(size_t index, size_t count) {
  return count == 1 ? "model.safetensors"
                    : fmt::format("model-{:05}-of-{:05}.safetensors", index + 1, count);
}

constexpr char kIndexName[] = "model.safetensors.index.json";

void refuse(const std::string& path) {
  throw CheckpointError(fmt::format(
      "[checkpoint] {}: is there already: remove it, or let it be replaced (--force)", path));
}

std::string above(const std::string& path) {
  const size_t slash = path.find_last_of('/');
  return slash == std::string::npos ? "." : slash == 0 ? "/" : path.substr(0, slash);
}

bool is_there(FileSystem& files, const std::string& path) {
  const auto names = files.list(above(path));
  return names && std::find(names->begin(), names->end(),
                            path.substr(path.find_last_of('/') + 1)) != names->end();
}

// What the names begin with: "are 'model' and 'optimizer'".
std::string text_of_tops(const TensorFiles& files) {
  constexpr size_t kMostTops = 8;
  std::set<std::string> tops;
  for (const auto& [name, tensor] : files.tensors()) {
    const size_t slash = name.find('/');
    tops.insert(name.substr(0, slash == std::string::npos ? name.find('.') : slash));
  }
  if (tops.empty()) return "is none";
  std::string text = tops.size() == 1 ? "is " : "are ";
  size_t count = 0;
  for (const auto& top : tops) {
    if (count == kMostTops) return text + ", ...";
    text += (count++ == 0 ? "" : ", ") + in_quotes(top);
  }
  return text;
}

// Where a file is written until it is whole: .tmp-9c41b7e20d5fa863-NAME, which no other export has.
class Temporary {
 public:
  explicit Temporary(FileSystem& files)
      : files_(files), prefix_(fmt::format("{}{}-", kTemporary, random_digits())) {}

  std::string of(const std::string& path) const {
    return fmt::format("{}/{}{}", above(path), prefix_, path.substr(path.find_last_of('/') + 1));
  }
  // Makes the file, which must not be there.
  std::string make(const std::string& path) const {
    std::string file = of(path);
    const int fd = files_.open(file, O_WRONLY | O_CREAT | O_EXCL | O_NOFOLLOW);
    if (fd < 0 || files_.close(fd) != 0) {
      throw_system_error(fmt::format("{}: {}, as which it begins", path, file), "cannot be made");
    }
    return file;
  }
  void put(const std::string& path) const {
    if (files_.rename(of(path), path) == 0) return;
    const auto* const cause = errno == ENOENT ? " (does another process, such as another rank, "
                                                "write it at the same time? One rank has to)"
                                              : "";
    throw_system_error(of(path), fmt::format("cannot be renamed to {}{}", path, cause));
  }
  void remove(const std::string& path) const { files_.unlink(of(path)); }

 private:
  FileSystem& files_;
  std::string prefix_;
};

std::string index_text(const std::map<std::string, std::string>& file_of, int64_t total) {
  nlohmann::ordered_json index;
  index["metadata"] = {{"total_size", total}};
  index["weight_map"] = file_of;
  return index.dump(2) + "\n";
}

int64_t bytes_of(const TensorToWrite& tensor) {
  return tensor.dtype.bytes() * elements(tensor.sizes);
}

// As many tensors to a shard, in their order, as it has room for.
std::vector<std::vector<TensorToWrite>> shards_of(std::vector<TensorToWrite> tensors,
                                                  int64_t most) {
  std::vector<std::vector<TensorToWrite>> shards(1);
  int64_t used = 0;
  for (auto& tensor : tensors) {
    const int64_t bytes = bytes_of(tensor);
    if (!shards.back().empty() && bytes > most - used) {
      shards.emplace_back();
      used = 0;
    }
    used += bytes;
    shards.back().push_back(std::move(tensor));
  }
  return shards;
}

// Whether write_folder() makes files of such names: of others, as model-best.safetensors, it is not
// asked to replace any.
bool is_ours(const std::string& name) {
  constexpr const char* kShard =
      "model-[0-9][0-9][0-9][0-9][0-9]-of-[0-9][0-9][0-9][0-9][0-9].safetensors";
  return name == kIndexName || name == "model.safetensors" || fnmatch(kShard, name.c_str(), 0) == 0;
}

TensorBytes as(const Dtype& to, const Dtype& own, std::string_view bytes, const std::string& name) {
  try {
    return converted(bytes, own.name(), to);
  } catch (const CheckpointError& error) {
    throw CheckpointError(fmt::format("[checkpoint] tensor {}: {}: choose a wider dtype",
                                      in_quotes(name), error.what()));
  }
}

}  // namespace

Selected select(const TensorFiles& files, const std::vector<std::string>& patterns) {
  Selected selected;
  std::map<std::string, std::string> new_names;  // of TensorFiles::tensors()
  for (const auto& [name, tensor] : files.tensors()) {
    const auto chosen = chosen_name(name, patterns);
    if (!chosen) continue;
    if (!selected.tensors.emplace(*chosen, name).second) {
      throw CheckpointError(fmt::format("[checkpoint] {}: both {} and {} would be called {}",
                                        files.path(), in_quotes(selected.tensors.at(*chosen)),
                                        in_quotes(name), in_quotes(*chosen)));
    }
    new_names[name] = *chosen;
  }
  for (const auto& [alias, target] : files.aliases()) {
    const auto chosen = chosen_name(alias, patterns);
    if (!chosen || selected.tensors.contains(*chosen)) continue;
    const auto stored = new_names.find(target);
    if (stored != new_names.end()) {
      selected.aliases[*chosen] = stored->second;
    } else {  // only another name of it was chosen
      selected.tensors[*chosen] = target;
      new_names[target] = *chosen;
    }
  }
  for (const auto& pattern : patterns) {
    const auto chooses = [&](const auto& entry) {
      return chosen_name(entry.first, pattern).has_value();
    };
    if (std::none_of(files.tensors().begin(), files.tensors().end(), chooses) &&
        std::none_of(files.aliases().begin(), files.aliases().end(), chooses)) {
      throw CheckpointError(
          fmt::format("[checkpoint] {}: no tensor is called {}, or is below it; there {}",
                      files.path(), in_quotes(pattern), text_of_tops(files)));
    }
  }
  return selected;
}

Selected renamed(const Selected& selected, const std::vector<Renaming>& renamings) {
  std::vector<bool> fits(renamings.size());
  const auto name_of = [&](const std::string& name) {
    for (size_t i = 0; i < renamings.size(); ++i) {
      const auto& [from, to] = renamings[i];
      const bool is_below =
          name.starts_with(from) && !is_pattern(from) &&
          (name.size() == from.size() || from.ends_with('/') || from.ends_with('.') ||
           name[from.size()] == '/' || name[from.size()] == '.');
      if (!is_below || from.empty()) continue;
      fits[i] = true;
      return to + name.substr(from.size());
    }
    return name;
  };
  Selected out;
  const auto put = [&](std::map<std::string, std::string>& into, const std::string& name,
                       const std::string& target) {
    const std::string other = name_of(name);
    if (other.empty() && !name.empty()) {
      throw CheckpointError(
          fmt::format("[checkpoint] {} would have no name: rename it to one", in_quotes(name)));
    }
    if (out.tensors.contains(other) || out.aliases.contains(other)) {
      throw CheckpointError(
          fmt::format("[checkpoint] two tensors would be called {}, one of them {}",
                      in_quotes(other), in_quotes(name)));
    }
    into.emplace(other, target);
  };
  for (const auto& [name, stored] : selected.tensors) put(out.tensors, name, stored);
  for (const auto& [alias, target] : selected.aliases) put(out.aliases, alias, name_of(target));
  for (size_t i = 0; i < renamings.size(); ++i) {
    if (fits[i]) continue;
    throw CheckpointError(fmt::format("[checkpoint] no tensor is called {}, or is below it",
                                      in_quotes(renamings[i].from)));
  }
  return out;
}

std::vector<TensorToWrite> to_write(TensorFiles& files, const Selected& selected,
                                    const std::optional<Dtype>& dtype) {
  std::vector<TensorToWrite> tensors;
  const auto bytes = std::make_shared<std::optional<TensorBytes>>();
  for (const auto& [name, stored] : selected.tensors) {
    const StoredTensor& tensor = files.tensors().at(stored);
    Sizes sizes = tensor.sizes;
    if (tensor.dtype == "C128") sizes.push_back(2);
    const bool converts = dtype && dtype->name() != tensor.dtype && is_convertible(tensor.dtype);
    const Dtype own = *Dtype::named(tensor.dtype == "C128" ? "F64" : tensor.dtype);
    tensors.push_back({name,
                       converts ? *dtype : own,
                       std::move(sizes),
                       {},
                       [&files, bytes, from = stored, own, to = converts ? *dtype : own]() {
                         bytes->reset();
                         bytes->emplace(files.read(from));
                         if (to != own) *bytes = as(to, own, (*bytes)->view(), from);
                         return (*bytes)->view();
                       }});
  }
  return tensors;
}

void write_file(const std::string& path, std::vector<TensorToWrite> tensors,
                const std::map<std::string, std::string>& metadata, Existing existing,
                FileSystem& files) {
  if (files.list(path)) {
    throw CheckpointError(fmt::format(
        "[checkpoint] {}: is a folder: name a file in it, as {}/model.safetensors", path, path));
  }
  if (is_stream(path)) {
    throw CheckpointError(fmt::format(
        "[checkpoint] {}: is a device, pipe or socket, which is not replaced: name a file", path));
  }
  if (existing == Existing::Error && is_there(files, path)) refuse(path);
  const Temporary temporary(files);
  try {
    write_safetensors(temporary.make(path), std::move(tensors), metadata, files);
    temporary.put(path);
  } catch (...) {
    temporary.remove(path);
    throw;
  }
  sync_directory(files, above(path));
}

void write_folder(const std::string& folder, std::vector<TensorToWrite> tensors,
                  const FolderOptions& options, Existing existing, FileSystem& files) {
  if (files.make_directory(folder) != 0 && errno != EEXIST) {
    throw_system_error(folder, "cannot be made");
  }
  if (!files.list(folder) && errno == ENOTDIR) {
    throw CheckpointError(fmt::format(
        "[checkpoint] {}: is a {}: name a folder, or NAME.safetensors for a file", folder,
        is_stream(folder) ? "device, pipe or socket, which is not replaced" : "file"));
  }
  const auto before = names_in(files, folder);
  for (const auto& name : before) {
    if (existing == Existing::Error && is_ours(name)) refuse(folder + "/" + name);
  }
  for (const auto& name : before) {
    // What an export that was killed has left.
    if (is_ours(std::string(exported_name(name)))) files.unlink(folder + "/" + name);
  }
  auto shards = shards_of(std::move(tensors), options.max_shard_bytes);
  std::map<std::string, std::string> file_of;
  int64_t total = 0;
  std::vector<std::string> names;  // of the files, in the order in which they are made
  const auto path_of = [&](const std::string& name) { return fmt::format("{}/{}", folder, name); };
  const Temporary temporary(files);
  const auto put = [&](const std::string& name) { temporary.put(path_of(name)); };
  try {
    // All under other names first: what is there stays whole while there may be no room.
    for (size_t i = 0; i < shards.size(); ++i) {
      const std::string& name = names.emplace_back(shard_name(i, shards.size()));
      for (const auto& tensor : shards[i]) {
        file_of[tensor.name] = name;
        total += bytes_of(tensor);
      }
      write_safetensors(temporary.make(path_of(name)), std::move(shards[i]), options.metadata,
                        files);
    }
    if (shards.size() > 1) {
      names.emplace_back(kIndexName);
      write_file(files, temporary.make(path_of(kIndexName)), index_text(file_of, total));
    }
    // Without its index a folder is not taken for whole while its files are replaced.
    if (files.unlink(path_of(kIndexName)) == 0) {
      sync_directory(files, folder);
    } else if (errno != ENOENT) {
      throw_system_error(path_of(kIndexName), "cannot be removed");
    }
    for (const auto& name : names) {
      if (name != kIndexName) put(name);
    }
    for (const auto& name : before) {
      const bool is_new = std::find(names.begin(), names.end(), name) != names.end();
      if (is_ours(name) && !is_new) files.unlink(path_of(name));
    }
    sync_directory(files, folder);
    if (shards.size() > 1) put(kIndexName);
  } catch (...) {
    for (const auto& name : names) temporary.remove(path_of(name));
    throw;
  }
  sync_directory(files, folder);
}

}  // namespace lockstep::checkpoint
