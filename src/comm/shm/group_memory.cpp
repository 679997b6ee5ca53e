#include "comm/shm/group_memory.h"

#include <algorithm>
#include <atomic>

namespace lockstep::comm {
namespace {

constexpr int64_t kFlags = 4096;

}  // namespace

struct GroupMemoryIndex::Mapping {
  char* part(int r) const { return segment.data() + r * part_bytes; }
  // Whether rank r has freed its part.
  std::atomic<uint8_t>& freed(int r) const {
    return reinterpret_cast<std::atomic<uint8_t>*>(part(size))[r];
  }
  bool freed_by_all() const {
    for (int r = 0; r < size; ++r) {
      if (freed(r).load(std::memory_order_acquire) == 0) return false;
    }
    return true;
  }

  Segment segment;
  int64_t id;
  int64_t part_bytes;
  int rank, size;
};

GroupMemoryIndex::GroupMemoryIndex() = default;
GroupMemoryIndex::~GroupMemoryIndex() = default;

std::optional<GroupMemoryIndex::Place> GroupMemoryIndex::find(const void* address, int64_t bytes,
                                                              int rank) const {
  const std::lock_guard lock(mutex_);
  const char* begin = static_cast<const char*>(address);
  for (const auto& mapping : all_) {
    const char* part = mapping->part(rank);
    if (begin < part || begin >= part + mapping->part_bytes ||
        bytes > part + mapping->part_bytes - begin)
      continue;
    return Place{mapping->id, begin - part};
  }
  return std::nullopt;
}

char* GroupMemoryIndex::part(int64_t segment, int rank) const {
  const std::lock_guard lock(mutex_);
  const auto found = std::find_if(all_.begin(), all_.end(),
                                  [&](const auto& mapping) { return mapping->id == segment; });
  return found == all_.end() ? nullptr : (*found)->part(rank);
}

void GroupMemoryIndex::sweep() {
  std::erase_if(all_, [](const auto& mapping) { return mapping->freed_by_all(); });
}

void GroupMemoryIndex::release(int64_t id) {
  const std::lock_guard lock(mutex_);
  for (const auto& mapping : all_) {
    if (mapping->id != id) continue;
    mapping->segment.discard(mapping->rank * mapping->part_bytes, mapping->part_bytes);
    mapping->freed(mapping->rank).store(1, std::memory_order_release);
  }
  sweep();
}

int64_t GroupMemory::bytes_for(int64_t part_bytes, int size) { return size * part_bytes + kFlags; }

GroupMemory::Extent GroupMemory::own_extent(int64_t part_bytes, int rank, int size) {
  return {rank * part_bytes, (rank + 1) * part_bytes + (rank + 1 == size ? kFlags : 0)};
}

GroupMemory::GroupMemory(Segment segment, int64_t id, int64_t part_bytes, int rank, int size,
                         std::shared_ptr<GroupMemoryIndex> index)
    : id_(id), index_(std::move(index)) {
  const std::lock_guard lock(index_->mutex_);
  index_->sweep();
  index_->all_.push_back(std::unique_ptr<GroupMemoryIndex::Mapping>(
      new GroupMemoryIndex::Mapping{std::move(segment), id, part_bytes, rank, size}));
}

GroupMemory::~GroupMemory() { index_->release(id_); }

}  // namespace lockstep::comm
