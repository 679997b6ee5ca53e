// `lockstep merge`, `export` and `diff`.
#include "lockstep/checkpoint/export.h"

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <yaml-cpp/yaml.h>

#include <array>
#include <charconv>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <optional>

#include "checkpoint/format/directory/folder_lock.h"
#include "checkpoints/commands.h"
#include "core/counted.h"
#include "lockstep/checkpoint/error.h"

namespace lockstep::tool {
namespace {

using checkpoint::Existing;
using checkpoint::TensorFiles;

std::map<std::string, std::string> metadata_of(const TensorFiles& files,
                                               const checkpoint::Selected& selected) {
  std::map<std::string, std::string> metadata = {{"format", "pt"}};
  if (const auto* manifest = files.manifest()) metadata["step"] = std::to_string(manifest->step);
  metadata.insert(selected.aliases.begin(), selected.aliases.end());
  return metadata;
}

Existing existing(const Output& output) {
  return output.force ? Existing::Replace : Existing::Error;
}

// The best checkpoint of a run that leaves its model, by the run's own files; empty: `folder` is
// none's, or the newest one counts.
std::string restored_best(const std::string& folder) {
  try {
    const YAML::Node config = YAML::LoadFile(folder + "/config.yaml");
    const YAML::Node section = config["checkpoint"];
    const bool restores = (section && section.IsMap() && section["restore_best"].as<bool>(false)) ||
                          config["load_best_model_at_end"].as<bool>(false);
    if (!restores) return "";
  } catch (const YAML::Exception&) {
    return "";
  }
  // A model beside the checkpoints goes before them.
  if (checkpoint::open_tensors(folder)->manifest() == nullptr) return "";
  std::ifstream file(folder + "/result.json");
  const auto result = nlohmann::json::parse(file, nullptr, false);
  const auto best = result.is_object() ? result.find("best_checkpoint") : result.end();
  if (!result.is_object() || best == result.end() || !best->is_string()) return "";
  // The run's folder may have another name by now, or be seen from elsewhere.
  const std::filesystem::path said = best->get<std::string>();
  const auto below = std::filesystem::path(folder) / "checkpoints" / said.filename();
  std::error_code error;
  return std::filesystem::is_directory(below, error)  ? below.string()
         : std::filesystem::is_directory(said, error) ? said.string()
                                                      : "";
}

std::vector<checkpoint::Renaming> renamings_of(const Output& output) {
  std::vector<checkpoint::Renaming> out;
  for (const std::string& text : output.renamings) {
    const size_t at = text.find('=');
    if (at == 0 || at == text.npos) {
      throw ConfigError(
          fmt::format("[export] --rename {}: give OLD=NEW, such as layers=model.layers", text));
    }
    out.push_back({text.substr(0, at), text.substr(at + 1)});
  }
  return out;
}

std::optional<checkpoint::Dtype> dtype_of(const Output& output) {
  if (output.dtype.empty()) return std::nullopt;
  return checkpoint::Dtype::named(output.dtype == "bf16"   ? "BF16"
                                  : output.dtype == "fp16" ? "F16"
                                                           : "F32");
}

int write(const Output& output, bool is_file, const std::string& best = "") {
  const auto files = checkpoint::open_tensors(best.empty() ? output.from : best);
  const auto selected = renamed(select(*files, output.only), renamings_of(output));
  auto tensors = to_write(*files, selected, dtype_of(output));
  int64_t bytes = 0;
  for (const auto& tensor : tensors)
    bytes += tensor.dtype.bytes() * checkpoint::elements(tensor.sizes);
  const auto count = std::ssize(tensors);
  const auto metadata = metadata_of(*files, selected);
  if (is_file) {
    checkpoint::write_file(output.to, std::move(tensors), metadata, existing(output));
  } else {
    checkpoint::FolderOptions options{.metadata = metadata};
    if (output.max_shard_bytes > 0) options.max_shard_bytes = output.max_shard_bytes;
    write_folder(checkpoint::without_end_slash(output.to), std::move(tensors), options,
                 existing(output));
  }
  fmt::print("{}: {}, {}, of {}{}\n", output.to, counted(count, "tensor"), text_of_bytes(bytes),
             files->path(),
             best.empty() ? "" : ", the best one, as checkpoint.restore_best has it");
  return 0;
}

// A selection, or everything where it chooses nothing.
checkpoint::Selected select_any(const TensorFiles& files, const std::vector<std::string>& patterns,
                                bool& chosen) {
  std::vector<std::string> found;
  for (const auto& pattern : patterns) {
    try {
      select(files, {pattern});
      found.push_back(pattern);
    } catch (const CheckpointError&) {
    }
  }
  chosen = chosen || !found.empty();
  return select(files, found);
}

std::map<std::string, std::string> names_in(const checkpoint::Selected& selected) {
  auto names = selected.tensors;
  for (const auto& [alias, target] : selected.aliases) names[alias] = selected.tensors.at(target);
  return names;
}

std::string type_of(const checkpoint::StoredTensor& tensor) {
  return fmt::format("{} [{}]", tensor.dtype, fmt::join(tensor.sizes, ", "));
}

// "" when they are the same.
std::string compare_tensors(TensorFiles& a, const std::string& name_a, TensorFiles& b,
                            const std::string& name_b, const checkpoint::Tolerance& tolerance) {
  const auto &one = a.tensors().at(name_a), &other = b.tensors().at(name_b);
  std::string types;
  if (one.dtype != other.dtype || one.sizes != other.sizes) {
    types = fmt::format("{} and {}", type_of(one), type_of(other));
  }
  const auto is_complex = [](const auto& tensor) { return tensor.dtype.front() == 'C'; };
  if (one.sizes != other.sizes || is_complex(one) != is_complex(other)) return types;
  const auto left = a.read(name_a), right = b.read(name_b);
  const auto found =
      checkpoint::difference(one.dtype, left.view(), other.dtype, right.view(), tolerance);
  if (!found.any()) return types;
  std::string text = types.empty() ? "" : types + "; ";
  text += fmt::format("{} of {} elements differ", found.differ, found.elements);
  if (found.differ > found.one_is_nan) {
    text += fmt::format(", by at most {:.3g}, relative {:.3g}", found.largest, found.relative);
  }
  if (found.one_is_nan > 0) text += fmt::format(", {} NaN on one side only", found.one_is_nan);
  if (found.only_bits > 0) {
    text += fmt::format(", {} have the same number in other bits (-0, NaN)", found.only_bits);
  }
  return text;
}

bool is_same(const checkpoint::Value& a, const checkpoint::Value& b) {
  const auto *one = std::get_if<double>(&a), *other = std::get_if<double>(&b);
  return a == b || (one != nullptr && other != nullptr && *one != *one && *other != *other);
}

// Prints what differs, and counts it.
class Report {
 public:
  template <class... Args>
  void operator()(fmt::format_string<Args...> text, Args&&... args) {
    fmt::print("{}\n", fmt::format(text, std::forward<Args>(args)...));
    ++count_;
  }
  int64_t count() const { return count_; }

 private:
  int64_t count_ = 0;
};

void compare_values(const TensorFiles& a, const TensorFiles& b, Report& report) {
  for (const auto& [name, value] : a.values()) {
    const auto other = b.values().find(name);
    if (other == b.values().end()) {
      report("value {}: only in {}", printable(name), a.path());
    } else if (!is_same(value, other->second)) {
      report("value {}: {} and {}", printable(name), text_of(value), text_of(other->second));
    }
  }
  for (const auto& [name, value] : b.values()) {
    if (!a.values().contains(name)) report("value {}: only in {}", printable(name), b.path());
  }
}

}  // namespace

int merge(const Output& output) { return write(output, true); }

int export_tensors(const Output& output) {
  const bool is_file = output.to.ends_with(".safetensors");
  for (const std::string_view end : {".pt", ".pth", ".bin", ".ckpt", ".npz", ".onnx", ".json"}) {
    if (!output.to.ends_with(end)) continue;
    throw ConfigError(
        fmt::format("[export] --to {}: only safetensors is written: give NAME.safetensors, or a "
                    "folder ({}/)",
                    output.to, output.to));
  }
  if (is_file && output.max_shard_bytes > 0) {
    throw ConfigError(
        "[export] --max-shard-size is about the files of a folder: give --to FOLDER, or leave it "
        "out");
  }
  return write(output, is_file, restored_best(output.from));
}

int compare(const Comparison& comparison) {
  const auto a = checkpoint::open_tensors(comparison.a), b = checkpoint::open_tensors(comparison.b);
  bool chosen = comparison.only.empty();
  const auto of_a = names_in(select_any(*a, comparison.only, chosen));
  const auto of_b = names_in(select_any(*b, comparison.only, chosen));
  if (!chosen) {
    throw CheckpointError(
        fmt::format("[diff] neither {} nor {} has a tensor that is called {}, or is below it",
                    a->path(), b->path(), fmt::join(comparison.only, ", ")));
  }
  Report report;
  int64_t same = 0;
  for (const auto& [name, stored] : of_a) {
    const auto other = of_b.find(name);
    if (other == of_b.end()) {
      report("{}: only in {}", printable(name), a->path());
    } else if (const auto text =
                   compare_tensors(*a, stored, *b, other->second, comparison.tolerance);
               !text.empty()) {
      report("{}: {}", printable(name), text);
    } else {
      ++same;
    }
  }
  for (const auto& [name, stored] : of_b) {
    if (!of_a.contains(name)) report("{}: only in {}", printable(name), b->path());
  }
  if (comparison.only.empty() && a->manifest() != nullptr && b->manifest() != nullptr) {
    compare_values(*a, *b, report);
  }
  fmt::print("{} {} the same, {}\n", counted(same, "tensor"), same == 1 ? "is" : "are",
             counted(report.count(), "difference"));
  return report.count() == 0 ? 0 : 1;
}

std::string text_of_bytes(int64_t bytes) {
  constexpr std::array kUnits = {"kB", "MB", "GB", "TB"};
  if (bytes < 1000) return fmt::format("{} B", bytes);
  double value = static_cast<double>(bytes) / 1000;
  size_t unit = 0;
  for (; value >= 999.95 && unit + 1 < kUnits.size(); ++unit) value /= 1000;
  return fmt::format("{:.1f} {}", value, kUnits[unit]);
}

int64_t bytes_in(const std::string& flag, const std::string& text) {
  constexpr std::array<std::pair<std::string_view, int64_t>, 8> kUnits = {{{"", 1},
                                                                           {"B", 1},
                                                                           {"KB", 1000},
                                                                           {"MB", 1000'000},
                                                                           {"GB", 1000'000'000},
                                                                           {"KiB", 1 << 10},
                                                                           {"MiB", 1 << 20},
                                                                           {"GiB", 1 << 30}}};
  int64_t value = 0;
  const auto [stop, status] = std::from_chars(text.data(), text.data() + text.size(), value);
  const std::string_view unit(stop, text.data() + text.size() - stop);
  for (const auto& [name, factor] : kUnits) {
    int64_t bytes = 0;
    if (status == std::errc() && name == unit && value > 0 &&
        !__builtin_mul_overflow(value, factor, &bytes)) {
      return bytes;
    }
  }
  throw ConfigError(fmt::format("[export] {} '{}': give bytes, such as 500MB or 2GiB", flag, text));
}

}  // namespace lockstep::tool
