// Tensors that all ranks of a host can see: what Group::empty() gives.
#pragma once

#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <vector>

#include "comm/shm/segment.h"

namespace lockstep::comm {

// Which group memory an address lies in. Tensors may be freed in any thread, and on each rank by
// itself: a segment that other ranks may still use in a call stays mapped here until all ranks have
// freed theirs.
class GroupMemoryIndex {
 public:
  GroupMemoryIndex();
  ~GroupMemoryIndex();

  struct Place {
    int64_t segment;
    int64_t offset;  // from the rank's part
  };
  // Nothing unless all of the bytes lie in `rank`'s part.
  std::optional<Place> find(const void* address, int64_t bytes, int rank) const;
  char* part(int64_t segment, int rank) const;

 private:
  friend class GroupMemory;
  struct Mapping;
  void sweep();
  void release(int64_t id);

  mutable std::mutex mutex_;
  std::vector<std::unique_ptr<Mapping>> all_;
};

// One segment with a part for each of the ranks, and after them where each says that it has freed
// its own. All ranks give it the same number.
class GroupMemory {
 public:
  // Bytes of a segment for `size` ranks, and those that `rank` gives their pages.
  struct Extent {
    int64_t begin, end;
  };
  static int64_t bytes_for(int64_t part_bytes, int size);
  static Extent own_extent(int64_t part_bytes, int rank, int size);

  GroupMemory(Segment segment, int64_t id, int64_t part_bytes, int rank, int size,
              std::shared_ptr<GroupMemoryIndex> index);
  ~GroupMemory();
  GroupMemory(const GroupMemory&) = delete;
  GroupMemory& operator=(const GroupMemory&) = delete;

 private:
  const int64_t id_;
  const std::shared_ptr<GroupMemoryIndex> index_;
};

}  // namespace lockstep::comm
