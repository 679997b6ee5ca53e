#include <fmt/format.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <optional>
#include <thread>

#include "checkpoint/format/checksum.h"
#include "checkpoint/format/directory/latest.h"
#include "checkpoint/format/directory/names.h"
#include "checkpoint/format/json.h"
#include "lockstep/checkpoint/checkpoint.h"
#include "lockstep/checkpoint/directory.h"
#include "lockstep/checkpoint/error.h"
#include "lockstep/checkpoint/tensor_files.h"

namespace lockstep::checkpoint {
namespace {

// What is wrong with `latest`; "" when nothing is.
std::string fault_of_latest(const std::string& directory, const Listing& listing,
                            FileSystem& files) {
  const std::string path = fmt::format("{}/{}", directory, kLatestName);
  const std::string cure =
      "Restoring does not need it; the next restore_latest() or save writes it again";
  const std::string newest = listing.checkpoints.empty() ? "" : listing.checkpoints.back().name;
  try {
    const MappedFile file(files, path);
    const std::string_view text = file.bytes();
    const std::string name(text.substr(0, text.find(' ')));
    if (text.size() != name.size() + 18 || text.back() != '\n' ||
        !from_hex(text.substr(name.size() + 1, 16))) {
      return fmt::format("[checkpoint] {}: is damaged: it holds {}. {}", path, in_quotes(text),
                         cure);
    }
    if (name != newest) {
      return fmt::format("[checkpoint] {}: names {}, and the newest that can be read is {}. {}",
                         path, in_quotes(name), newest.empty() ? "none" : newest, cure);
    }
    const MappedFile manifest(files, fmt::format("{}/{}/{}", directory, name, kManifestName));
    if (hex(checksum(manifest.bytes())) == text.substr(name.size() + 1, 16)) return "";
    return fmt::format(
        "[checkpoint] {}: does not match the checksum of {}/{}: one of them was replaced. {}", path,
        name, kManifestName, cure);
  } catch (const CheckpointError& error) {
    return newest.empty() ? "" : fmt::format("{}. {}", error.what(), cure);
  }
}

// A job publishes a checkpoint first, and then replaces `latest`: what it has not done after this
// time it did not come to.
constexpr std::chrono::seconds kReplacing(2);
constexpr std::chrono::milliseconds kLookAgain(20);

// Whether `latest` is whole, of an older checkpoint that is there.
bool is_of_older_one(const std::string& directory, const Listing& listing, FileSystem& files) {
  try {
    const MappedFile latest(files, fmt::format("{}/{}", directory, kLatestName));
    const std::string name(latest.bytes().substr(0, latest.bytes().find(' ')));
    const auto is_named = [&](const Published& one) { return one.name == name; };
    return std::any_of(listing.checkpoints.begin(), listing.checkpoints.end(), is_named) &&
           latest.bytes() ==
               latest_text(name, MappedFile(files, manifest_path(directory, name)).bytes());
  } catch (const CheckpointError&) {
    return false;
  }
}

// The fault that `latest` still has when no job changes anything meanwhile.
std::string lasting_fault_of_latest(const std::string& directory, FileSystem& files) {
  const auto until = std::chrono::steady_clock::now() + kReplacing;
  std::string before;
  for (;;) {
    const Listing listing = list_checkpoints(directory, files);
    std::string fault = fault_of_latest(directory, listing, files);
    if (fault.empty()) return fault;
    const bool may_pass = fault != before || is_of_older_one(directory, listing, files);
    if (!may_pass || std::chrono::steady_clock::now() >= until) return fault;
    if (fault == before) std::this_thread::sleep_for(kLookAgain);
    before = std::move(fault);
  }
}

// The manifest's bytes; empty where there are none to be read.
std::string manifest_bytes(const std::string& folder, FileSystem& files) {
  try {
    return std::string(MappedFile(files, fmt::format("{}/{}", folder, kManifestName)).bytes());
  } catch (const CheckpointError&) {
    return "";
  }
}

// Nothing where a job has removed the checkpoint meanwhile, which it does by renaming it.
std::optional<std::vector<std::string>> verify_unless_removed(const std::string& folder,
                                                              FileSystem& files) {
  for (;;) {
    const std::string before = manifest_bytes(folder, files);
    auto findings = verify(folder, files);
    if (findings.empty()) return findings;
    if (!files.list(folder) && errno == ENOENT) return std::nullopt;
    // A step that was removed may have been saved again.
    if (manifest_bytes(folder, files) == before) return findings;
  }
}

}  // namespace

DirectoryFindings verify_directory(const std::string& path, FileSystem& files) {
  DirectoryFindings findings;
  for (bool are_all_gone = true; are_all_gone;) {  // then newer ones have taken their place
    findings = {};
    are_all_gone = false;
    for (const auto& name : names_in(files, path)) {
      if (is_leftover(name)) findings.unfinished.push_back(name);
      if (!name.starts_with(kStep)) continue;
      auto found = verify_unless_removed(path + "/" + name, files);
      are_all_gone = findings.checkpoints.empty() && !found;
      if (found) findings.checkpoints[name] = std::move(*found);
    }
  }
  if (std::string fault = lasting_fault_of_latest(path, files); !fault.empty()) {
    findings.directory.push_back(std::move(fault));
  }
  return findings;
}

}  // namespace lockstep::checkpoint
