// A checkpoint of two ranks, written by one process.
#pragma once

#include <string>
#include <utility>
#include <vector>

#include "lockstep/checkpoint/checkpoint.h"
#include "lockstep/checkpoint/directory.h"

namespace lockstep::test {

namespace ck = lockstep::checkpoint;

inline ck::Dtype dtype(const char* name) { return *ck::Dtype::named(name); }

template <class T>
std::string_view bytes_of(const std::vector<T>& values) {
  return {reinterpret_cast<const char*>(values.data()), values.size() * sizeof(T)};
}

// Adds a file to the manifest: one box of each tensor.
struct Part {
  std::string tensor;
  ck::Sizes sizes;
  ck::Box box;
  std::vector<float> values;
};

inline void write_part(ck::FileSystem& files, const std::string& folder, const std::string& name,
                       const std::vector<Part>& parts, ck::Manifest& manifest) {
  std::vector<ck::TensorToWrite> tensors;
  for (const auto& part : parts) {
    tensors.push_back({part.tensor, dtype("F32"), part.box.size, bytes_of(part.values)});
  }
  const auto written = ck::write_safetensors(folder + "/" + name, tensors, {}, files);
  manifest.files[name] = {written.bytes, written.checksum};
  for (const auto& part : parts) {
    auto& tensor = manifest.tensors[part.tensor];
    tensor.dtype = "F32";
    tensor.sizes = part.sizes;
    tensor.boxes.push_back({part.box, name, part.tensor, written.tensors.at(part.tensor)});
  }
}

// "weight" of 4 rows, two in each file, and "bias": all elements are `value`.
inline std::string save(ck::Directory& directory, int64_t step, float value,
                        ck::FileSystem& files = ck::system_files(),
                        std::map<std::string, double> metrics = {}) {
  const std::string folder = directory.begin(step);
  ck::Manifest manifest{.step = step, .world = 2, .metrics = std::move(metrics)};
  manifest.values["lr"] = 0.1;
  const std::vector<float> half(6, value), bias(3, value);
  const ck::Sizes weight{4, 3};
  write_part(files, folder, "shard-0-of-2.safetensors",
             {{"weight", weight, {{0, 0}, {2, 3}}, half}, {"bias", {3}, {{0}, {3}}, bias}},
             manifest);
  write_part(files, folder, "shard-1-of-2.safetensors",
             {{"weight", weight, {{2, 0}, {2, 3}}, half}}, manifest);
  return directory.publish(manifest);
}

// The value that all elements of a whole checkpoint have. Throws what is wrong with another.
inline float value_of(const std::string& folder) {
  ck::Checkpoint checkpoint(folder);
  float value = 0;
  for (const auto& [name, tensor] : checkpoint.manifest().tensors) {
    for (const auto& box : tensor.boxes) {
      checkpoint.check(name, box);
      const auto bytes = checkpoint.bytes(name, box);
      std::copy_n(bytes.data(), sizeof value, reinterpret_cast<char*>(&value));
    }
  }
  return value;
}

}  // namespace lockstep::test
