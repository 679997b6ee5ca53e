// What the commands about checkpoints do. Each prints to stdout and returns the exit status.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "lockstep/checkpoint/difference.h"
#include "lockstep/checkpoint/manifest.h"

namespace lockstep::tool {

struct Inspection {
  std::string path;
  std::vector<std::string> only;
  bool json = false;
  int64_t episode = 0;  // of a file of trajectories, from 1; 0: an overview
};
int inspect(const Inspection& inspection);

// What episodes of three_domain are in a file with one a line, or one of them.
int inspect_trajectories(const std::string& path, int64_t episode);

// 1 when anything is damaged.
int verify(const std::string& path);

struct Output {
  std::string from, to;
  std::vector<std::string> only;
  std::vector<std::string> renamings;  // "OLD=NEW"
  std::string dtype;                   // "bf16"; empty: each as it is
  int64_t max_shard_bytes = 0;         // 0: as large as Hugging Face's libraries make them
  bool force = false;
};
// One file.
int merge(const Output& output);
// One file, or a folder of shards.
int export_tensors(const Output& output);

struct Comparison {
  std::string a, b;
  std::vector<std::string> only;
  checkpoint::Tolerance tolerance;
};
// 0 when both are the same, 1 when they differ.
int compare(const Comparison& comparison);

// As it is, but for control characters and bytes that are not UTF-8: "\x0a".
std::string printable(std::string_view text);
// Printable, and cut where it is long.
std::string text_of(const checkpoint::Value& value);
// "12.3 MB".
std::string text_of_bytes(int64_t bytes);
// "500MB", "2GiB", "1000". Throws ConfigError.
int64_t bytes_in(const std::string& flag, const std::string& text);

}  // namespace lockstep::tool
