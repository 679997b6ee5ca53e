#include "lockstep/checkpoint/interchange.h"

#include <ATen/ops/view_as_complex.h>
#include <c10/util/StringUtil.h>
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <optional>
#include <set>

#include "checkpoint/loads.h"
#include "checkpoint/share.h"
#include "checkpoint/stored_view.h"
#include "lockstep/checkpoint/export.h"
#include "lockstep/checkpoint/state.h"
#include "lockstep/checkpoint/tensor_files.h"

namespace lockstep::checkpoint {
namespace {

constexpr size_t kMostListed = 200;

// A parameter or buffer with all names that it has, the first of them first.
struct Entry {
  at::Tensor tensor;
  std::vector<std::string> names;
};

std::vector<Entry> entries_of(const ModuleRef& module) {
  std::vector<Entry> entries;
  std::map<const at::TensorImpl*, size_t> seen;
  for (const auto& tensors : {module.parameters(), module.buffers()}) {
    for (const auto& [name, tensor] : tensors) {
      if (!tensor.defined()) continue;
      const auto [known, fresh] = seen.try_emplace(tensor.unsafeGetTensorImpl(), entries.size());
      if (fresh) entries.push_back({tensor.detach(), {}});
      entries[known->second].names.push_back(name);
    }
  }
  return entries;
}

// Whether a complex tensor stands there as pairs of real numbers.
bool are_pairs(const at::Tensor& tensor, const StoredTensor& stored) {
  if (!tensor.is_complex() || (stored.dtype != "F32" && stored.dtype != "F64")) return false;
  auto sizes = tensor.sizes().vec();
  sizes.push_back(2);
  return stored.sizes == sizes;
}

// Reads a module, in two steps: compare and verify, then change.
class ModuleLoader {
 public:
  ModuleLoader(const std::string& path, const LoadOptions& options)
      : files_(open_tensors(path)), options_(options) {
    const auto add = [&](const std::string& name, const std::string& stored) {
      if (name.starts_with(options.prefix) && name.size() > options.prefix.size()) {
        there_[name.substr(options.prefix.size())] = stored;
      } else {
        outside_ = true;
      }
    };
    for (const auto& [name, tensor] : files_->tensors()) add(name, name);
    for (const auto& [name, target] : files_->aliases()) add(name, target);
    if (there_.empty() && outside_) {
      throw CheckpointError(fmt::format("[checkpoint] {}: no name begins with '{}'; there are {}",
                                        files_->path(), options.prefix, some_names()));
    }
  }

  Loaded load(const ModuleRef& module) {
    for (const auto& entry : entries_of(module)) compare(entry);
    for (const auto& [name, stored] : there_) {
      if (used_.contains(name)) continue;
      loaded_.unexpected.push_back(name);
      if (!matches(name, options_.allow_unexpected)) {
        faults_.push_back(
            fmt::format("{} is unexpected: the module has nothing of that name", name));
      }
    }
    if (!faults_.empty()) complain();
    for (auto& read : reads_) read.bytes.emplace(files_->read(read.stored));
    const at::NoGradGuard no_grad;
    ++loads();
    for (const auto& read : reads_) {
      const StoredTensor& stored = files_->tensors().at(read.stored);
      at::Tensor from = view_of(read.bytes->view(), stored);
      if (are_pairs(read.to, stored)) from = at::view_as_complex(from);
      at::Tensor to = read.to;
      to.copy_(from);
    }
    loaded_.values = files_->values();
    loaded_.metadata = files_->metadata();
    return std::move(loaded_);
  }

 private:
  struct Read {
    at::Tensor to;
    std::string stored;
    std::optional<TensorBytes> bytes = std::nullopt;
  };

  std::string some_names() const {
    std::vector<std::string> names;
    for (const auto& [name, tensor] : files_->tensors()) {
      if (names.size() < 5) names.push_back(name);
    }
    return fmt::format("{}{}", fmt::join(names, ", "), files_->tensors().size() > 5 ? ", ..." : "");
  }

  void compare(const Entry& entry) {
    std::string found;
    for (const auto& name : entry.names) {
      const auto stored = there_.find(name);
      if (stored == there_.end()) continue;
      used_.insert(name);
      if (!found.empty() && found != stored->second && !same_bytes(found, stored->second)) {
        faults_.push_back(
            fmt::format("{} and {} are one parameter here, and have different values there",
                        entry.names.front(), name));
      }
      found = stored->second;
    }
    const std::string& name = entry.names.front();
    const auto sizes = entry.tensor.sizes();
    if (found.empty()) {
      loaded_.missing.push_back(name);
      if (!matches(name, options_.allow_missing)) {
        faults_.push_back(fmt::format("{} is missing: {} here", name,
                                      type_text(dtype_of(entry.tensor.scalar_type()), sizes)));
      }
      return;
    }
    const StoredTensor& stored = files_->tensors().at(found);
    if (!fits(entry.tensor, stored, name)) {
      faults_.push_back(fmt::format("{} differs: {} there, {} here", name,
                                    type_text(stored.dtype, stored.sizes),
                                    type_text(dtype_of(entry.tensor.scalar_type()), sizes)));
    } else if (const auto why = obstacle_to_writing(entry.tensor); !why.empty()) {
      faults_.push_back(fmt::format("{} cannot be written to here: {}", name, why));
    } else {
      reads_.push_back({entry.tensor, found});
    }
  }

  bool same_bytes(const std::string& a, const std::string& b) {
    const StoredTensor &one = files_->tensors().at(a), &other = files_->tensors().at(b);
    return one.dtype == other.dtype && one.sizes == other.sizes &&
           files_->read(a).view() == files_->read(b).view();
  }

  bool fits(const at::Tensor& tensor, const StoredTensor& stored, const std::string& name) const {
    const std::string dtype = dtype_of(tensor.scalar_type());
    const bool converts = matches(name, options_.allow_conversion);
    if (are_pairs(tensor, stored)) {
      return converts || dtype == (stored.dtype == "F32" ? "C64" : "C128");
    }
    if (tensor.sizes() != at::IntArrayRef(stored.sizes)) return false;
    const bool is_complex = stored.dtype == "C64" || stored.dtype == "C128";
    return stored.dtype == dtype || (converts && (tensor.is_complex() || !is_complex));
  }

  [[noreturn]] void complain() const {
    const size_t shown = std::min(faults_.size(), kMostListed);
    throw CheckpointError(fmt::format(
        "[checkpoint] {} does not fit the module:\n    {}{}", files_->path(),
        fmt::join(faults_.begin(), faults_.begin() + static_cast<ptrdiff_t>(shown), "\n    "),
        shown < faults_.size() ? fmt::format("\n    and {} more", faults_.size() - shown) : ""));
  }

  std::unique_ptr<TensorFiles> files_;
  const LoadOptions& options_;
  std::map<std::string, std::string> there_;  // the module's names, and the files'
  bool outside_ = false;
  std::set<std::string> used_;
  std::vector<std::string> faults_;
  std::vector<Read> reads_;
  Loaded loaded_;
};

// What is written of a tensor, with its memory when it is asked.
TensorToWrite to_write(const std::string& name, const at::Tensor& tensor,
                       const std::shared_ptr<at::Tensor>& kept) {
  if (tensor.layout() != at::kStrided) {
    throw CheckpointError(
        fmt::format("[checkpoint] {} is not dense ({}): safetensors has no such tensors", name,
                    c10::str(tensor.layout())));
  }
  const bool is_wide = tensor.scalar_type() == at::kComplexDouble;
  auto sizes = tensor.sizes().vec();
  if (is_wide) sizes.push_back(2);
  const auto dtype = Dtype::named(is_wide ? "F64" : dtype_of(tensor.scalar_type()));
  return {name, *dtype, std::move(sizes), {}, [tensor, kept]() -> std::string_view {
            *kept = tensor.resolve_conj().resolve_neg().to(at::kCPU).contiguous();
            return {static_cast<const char*>(kept->const_data_ptr()), kept->nbytes()};
          }};
}

}  // namespace

Loaded load_module(const ModuleRef& module, const std::string& path, const LoadOptions& options) {
  return ModuleLoader(path, options).load(module);
}

std::map<std::string, at::Tensor> read_tensors(const std::string& path, const std::string& prefix) {
  const auto files = open_tensors(path);
  std::map<std::string, at::Tensor> tensors;
  for (const auto& [name, stored] : files->tensors()) {
    if (!name.starts_with(prefix)) continue;
    const TensorBytes bytes = files->read(name);
    tensors[name.substr(prefix.size())] = view_of(bytes.view(), stored).clone();
  }
  for (const auto& [name, target] : files->aliases()) {
    if (!name.starts_with(prefix)) continue;
    const auto stored =
        target.starts_with(prefix) ? tensors.find(target.substr(prefix.size())) : tensors.end();
    tensors[name.substr(prefix.size())] =
        stored != tensors.end()
            ? stored->second
            : view_of(files->read(target).view(), files->tensors().at(target)).clone();
  }
  return tensors;
}

void save_safetensors(const ModuleRef& module, const std::string& path,
                      const SaveOptions& options) {
  const at::NoGradGuard no_grad;
  FolderOptions folder{.max_shard_bytes = options.max_shard_bytes, .metadata = options.metadata};
  std::vector<TensorToWrite> tensors;
  const auto kept = std::make_shared<at::Tensor>();
  for (const auto& entry : entries_of(module)) {
    const std::string first = options.prefix + entry.names.front();
    tensors.push_back(to_write(first, entry.tensor, kept));
    for (size_t i = 1; i < entry.names.size(); ++i) {
      folder.metadata[options.prefix + entry.names[i]] = first;
    }
  }
  if (path.ends_with(".safetensors")) {
    write_file(path, std::move(tensors), folder.metadata, Existing::Replace);
  } else {
    write_folder(path, std::move(tensors), folder, Existing::Replace);
  }
}

}  // namespace lockstep::checkpoint
