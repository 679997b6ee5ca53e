#include "checkpoint/save.h"

#include <fcntl.h>
#include <fmt/format.h>

#include <cerrno>

#include "checkpoint/format/checksum.h"
#include "checkpoint/format/json.h"
#include "lockstep/checkpoint/error.h"

namespace lockstep::checkpoint {

// The rank's file, and what publish() reads of each box, as JSON; nothing when there is none to
// write.
std::string Save::write_share() const {
  if (share.entries.empty()) return "";
  const std::string name = fmt::format("shard-{}-of-{}.safetensors", group.rank(), group.size());
  const WrittenFile written = write_safetensors(folder + "/" + name, share.entries, {}, *files);
  Json report{{"file", name}, {"bytes", written.bytes}, {"xxh3", hex(written.checksum)}};
  for (size_t i = 0; i < share.entries.size(); ++i) {
    const auto& [tensor, dtype, sizes, box] = share.boxes[i];
    const auto& entry = share.entries[i].name;
    report["boxes"].push_back(Json::array(
        {tensor, dtype, sizes, box.offset, box.size, entry, hex(written.tensors.at(entry))}));
  }
  return report.dump();
}

// Where each host has a disk of its own, the others do not see what rank 0 has made.
std::string Save::advice() const {
  const int fd = files->open(folder, O_RDONLY | O_DIRECTORY);
  const bool is_absent = fd < 0 && errno == ENOENT;
  if (fd >= 0) files->close(fd);
  if (!is_absent) return "";
  return ". Rank 0 has made this folder, and it is not there: give all hosts one directory, on a "
         "file system that they share";
}

void Save::publish(const std::vector<std::string>& reports) const {
  Manifest whole = manifest;
  for (const auto& text : reports) {
    if (text.empty()) continue;
    const Json report = Json::parse(text);
    const std::string file = report["file"];
    whole.files[file] = {report["bytes"], *from_hex(report["xxh3"].get<std::string>())};
    for (const auto& box : report["boxes"]) {
      const std::string name = box[0], dtype = box[1];
      const Sizes sizes = box[2];
      const auto [place, fresh] = whole.tensors.try_emplace(name, ManifestTensor{dtype, sizes, {}});
      auto& tensor = place->second;
      if (tensor.dtype != dtype || tensor.sizes != sizes) {
        throw CheckpointError(
            fmt::format("[checkpoint] the ranks give {} different sizes or dtypes", name));
      }
      tensor.boxes.push_back(
          {{box[3], box[4]}, file, box[5], *from_hex(box[6].get<std::string>())});
    }
  }
  for (const auto& [name, tensor] : whole.tensors) {
    std::vector<Box> boxes;
    for (const auto& box : tensor.boxes) boxes.push_back(box.box);
    if (const auto fault = fault_of(tensor.sizes, boxes); !fault.empty()) {
      throw CheckpointError(fmt::format(
          "[checkpoint] the ranks' parts of {} are not all of it once: {}", name, fault));
    }
  }
  directory->publish(std::move(whole));
  directory->retain(retention);
}

void Save::run() const {
  constexpr char kWell = '+', kFailed = '-';
  std::string mine;
  try {
    mine = kWell + write_share();
  } catch (const std::exception& error) {
    mine = kFailed + std::string(error.what()) + advice();
  }
  const auto reports =
      group.gather_bytes(mine, 0, {.timeout = timeout, .label = "checkpoint: written"});
  std::string fault;
  if (group.rank() == 0) {
    std::vector<std::string> own;
    for (size_t rank = 0; rank < reports.size(); ++rank) {
      if (reports[rank].front() == kFailed) {
        fault += fmt::format("\n  rank {}: {}", rank, reports[rank].substr(1));
      }
      own.push_back(reports[rank].substr(1));
    }
    try {
      if (fault.empty()) publish(own);
    } catch (const std::exception& error) {
      fault = fmt::format("\n  rank 0: {}", error.what());
    }
    directory->abandon();
  }
  fault = group.broadcast_bytes(fault, 0, {.timeout = timeout, .label = "checkpoint: published"});
  if (fault.empty()) return;
  throw CheckpointError(
      fmt::format("[checkpoint] step {} was not saved in full:{}", manifest.step, fault));
}

}  // namespace lockstep::checkpoint
