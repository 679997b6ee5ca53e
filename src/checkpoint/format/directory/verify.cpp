#include <fmt/format.h>

#include <cerrno>

#include "checkpoint/format/checksum.h"
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
        "[checkpoint] {}: has not the checksum of {}/{}: one of them was replaced. {}", path, name,
        kManifestName, cure);
  } catch (const CheckpointError& error) {
    return newest.empty() ? "" : fmt::format("{}. {}", error.what(), cure);
  }
}

}  // namespace

DirectoryFindings verify_directory(const std::string& path, FileSystem& files) {
  DirectoryFindings findings;
  const Listing listing = list_checkpoints(path, files);
  for (const auto& name : names_in(files, path)) {
    if (name.starts_with(kStep)) findings.checkpoints[name] = verify(path + "/" + name, files);
    if (is_leftover(name)) findings.unfinished.push_back(name);
  }
  if (std::string fault = fault_of_latest(path, listing, files); !fault.empty()) {
    findings.directory.push_back(std::move(fault));
  }
  return findings;
}

}  // namespace lockstep::checkpoint
