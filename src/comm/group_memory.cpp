#include "comm/group_memory.h"

#include <algorithm>

namespace lockstep::comm {

std::optional<GroupMemoryIndex::Place> GroupMemoryIndex::find(const void* address, int64_t bytes, int rank) const {
  const std::lock_guard lock(mutex_);
  const char* begin = static_cast<const char*>(address);
  for (const GroupMemory* memory : all_) {
    const char* part = memory->part(rank);
    if (begin < part || begin >= part + memory->part_bytes_ || bytes > part + memory->part_bytes_ - begin) continue;
    return Place{memory->id_, begin - part};
  }
  return std::nullopt;
}

char* GroupMemoryIndex::part(int64_t segment, int rank) const {
  const std::lock_guard lock(mutex_);
  const auto found = std::find_if(all_.begin(), all_.end(), [&](const GroupMemory* m) { return m->id_ == segment; });
  return found == all_.end() ? nullptr : (*found)->part(rank);
}

GroupMemory::GroupMemory(Segment segment, int64_t id, int64_t part_bytes, std::shared_ptr<GroupMemoryIndex> index)
    : segment_(std::move(segment)), id_(id), part_bytes_(part_bytes), index_(std::move(index)) {
  const std::lock_guard lock(index_->mutex_);
  index_->all_.push_back(this);
}

GroupMemory::~GroupMemory() {
  const std::lock_guard lock(index_->mutex_);
  std::erase(index_->all_, this);
}

}  // namespace lockstep::comm
