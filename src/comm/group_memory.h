// Tensors that all ranks of a host can see: what Group::empty() gives.
#pragma once

#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <vector>

#include "comm/segment.h"

namespace lockstep::comm {

class GroupMemory;

// Which group memory an address lies in. Tensors may be freed in any thread.
class GroupMemoryIndex {
 public:
  struct Place {
    int64_t segment;
    int64_t offset;  // from the rank's part
  };
  // Nothing unless all of the bytes lie in `rank`'s part.
  std::optional<Place> find(const void* address, int64_t bytes, int rank) const;
  char* part(int64_t segment, int rank) const;

 private:
  friend class GroupMemory;
  mutable std::mutex mutex_;
  std::vector<const GroupMemory*> all_;
};

// One segment with a part for each rank. All ranks number it alike.
class GroupMemory {
 public:
  GroupMemory(Segment segment, int64_t id, int64_t part_bytes, std::shared_ptr<GroupMemoryIndex> index);
  ~GroupMemory();
  GroupMemory(const GroupMemory&) = delete;
  GroupMemory& operator=(const GroupMemory&) = delete;

  char* part(int rank) const { return segment_.data() + rank * part_bytes_; }

 private:
  friend class GroupMemoryIndex;
  Segment segment_;
  int64_t id_;
  int64_t part_bytes_;
  std::shared_ptr<GroupMemoryIndex> index_;
};

}  // namespace lockstep::comm
