#include "launch/output/logs.h"

#include <fcntl.h>
#include <fmt/format.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <filesystem>

#include "lockstep/core/environment.h"

namespace lockstep::launch {
namespace {

namespace fs = std::filesystem;

// What said where the files go.
const char* origin(const Options& options) {
  if (!options.log_dir.empty()) return "--log-dir";
  return env_text("TMPDIR") ? "TMPDIR" : "--log-dir is not given";
}

[[noreturn]] void refuse(const Options& options, const std::string& path, std::string_view reason) {
  throw ConfigError(
      fmt::format("[run] {}: cannot write to '{}': {}", origin(options), path, reason));
}

void make(const Options& options, const std::string& path) {
  std::error_code error;
  fs::create_directories(path, error);
  if (error) refuse(options, path, error.message());
}

}  // namespace

bool Logs::are_asked_for(const Options& options) {
  return !options.log_dir.empty() || !options.redirects.is_empty() || !options.tee.is_empty() ||
         !options.out_filters.empty() || !options.err_filters.empty();
}

Logs::Logs(const Options& options) {
  if (!are_asked_for(options)) return;
  std::string parent = options.log_dir;
  if (parent.empty()) {
    parent = env_text("TMPDIR").value_or("/tmp");
  } else {
    make(options, parent);
  }
  // Ranks that change their folder still find the files.
  std::error_code error;
  if (const fs::path whole = fs::absolute(parent, error); !error) parent = whole;
  std::string name = options.run_id;
  std::replace(name.begin(), name.end(), '/', '_');
  folder_ = fmt::format("{}/{}_XXXXXX", parent, name);
  if (mkdtemp(folder_.data()) == nullptr) refuse(options, parent, std::strerror(errno));
}

std::string Logs::attempt(int restarts) const {
  return fmt::format("{}/attempt_{}", folder_, restarts);
}

std::string Logs::of_rank(int restarts, int local_rank) const {
  return fmt::format("{}/{}", attempt(restarts), local_rank);
}

std::vector<Logs::Files> Logs::open_all(const Options& options, int restarts) const {
  std::vector<Files> all(static_cast<size_t>(options.ranks));
  for (int local = 0; is_on() && local < options.ranks; ++local) {
    const std::string folder = of_rank(restarts, local);
    make(options, folder);
    const auto open_one = [&](StreamChoice::Stream stream, const char* name) {
      const bool wanted =
          options.redirects.covers(local, stream) || options.tee.covers(local, stream);
      if (!wanted) return Fd();
      // For appending: the rank and the launcher may both write to it.
      const std::string path = folder + name;
      Fd file(open(path.c_str(), O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0666));
      if (!file) refuse(options, path, std::strerror(errno));
      return file;
    };
    Files& files = all[static_cast<size_t>(local)];
    files.has_folder = true;
    files.out = open_one(StreamChoice::Out, kOut);
    files.err = open_one(StreamChoice::Err, kErr);
  }
  return all;
}

}  // namespace lockstep::launch
