#include <fcntl.h>
#include <fmt/format.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "core/files/fd.h"
#include "core/flight/block.h"
#include "core/flight/segment.h"
#include "lockstep/core/error.h"

namespace lockstep::flight {
namespace {

constexpr int kMostRanks = 1 << 16;

// Text that the rank has written, at most as much as fits.
template <size_t N>
std::string text_of(const char (&text)[N]) {
  return {text, strnlen(text, N)};
}
template <size_t N>
std::string text_of(const std::array<char, N>& text) {
  return {text.data(), strnlen(text.data(), N)};
}

std::optional<Stack> stack_of(const Trace& trace) {
  if (trace.told.load(std::memory_order_acquire) == 0) return std::nullopt;
  Stack stack{.at_ns = trace.at_ns, .signal = trace.signal};
  for (uint32_t i = 0; i < std::min(trace.frames, kFrames); ++i) {
    stack.frames.push_back(
        {text_of(trace.modules[std::min<uint32_t>(trace.module[i], kModules - 1)]),
         trace.offset[i]});
  }
  return stack;
}

double seconds(uint64_t from_ns, uint64_t to_ns) {
  return to_ns > from_ns ? static_cast<double>(to_ns - from_ns) * 1e-9 : 0.0;
}

}  // namespace

uint64_t now_ns() noexcept {
  timespec now{};
  clock_gettime(CLOCK_MONOTONIC, &now);
  return static_cast<uint64_t>(now.tv_sec) * 1'000'000'000 + static_cast<uint64_t>(now.tv_nsec);
}

std::string Operation::text() const {
  std::string inside = text_of(label);
  const auto add = [&inside](const std::string& part) {
    inside += (inside.empty() ? "" : ", ") + part;
  };
  const std::string type = text_of(dtype);
  if (!type.empty()) add(count >= 0 ? fmt::format("{} x {}", type, count) : type);
  if (peer >= 0) add(fmt::format("rank {}", peer));
  const std::string name =
      number == 0 ? text_of(what) : fmt::format("{} #{}", text_of(what), number);
  return inside.empty() ? name : fmt::format("{} ({})", name, inside);
}

std::string Log::where(uint64_t at_ns) const {
  if (calls == 0) return "";
  if (blocked_in != 0) {
    const uint32_t back = calls - blocked_in;
    const std::string what = back < last.size() ? last[last.size() - 1 - back].text() : "a call";
    return fmt::format("in {}, for {:.2f} s", what, seconds(blocked_since_ns, at_ns));
  }
  const Operation& latest = last.back();
  return fmt::format("in no collective; the last was {}, {:.2f} s before", latest.text(),
                     seconds(std::max(latest.start_ns, latest.end_ns), at_ns));
}

Segment::Segment(int local_ranks) : ranks_(local_ranks) {
  if (local_ranks < 1 || local_ranks > kMostRanks) {
    throw ConfigError(
        fmt::format("[flight] {} ranks on this host: need 1 to {}", local_ranks, kMostRanks));
  }
  const size_t bytes = static_cast<size_t>(ranks_) * kBlockBytes;
  fd_ = memfd_create("lockstep-flight", MFD_CLOEXEC | MFD_ALLOW_SEALING);
  if (fd_ >= 0 && ftruncate(fd_, static_cast<off_t>(bytes)) == 0 &&
      fcntl(fd_, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL) == 0) {
    memory_ = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd_, 0);
  }
  if (memory_ == nullptr || memory_ == MAP_FAILED) {
    const int error = errno;
    if (fd_ >= 0) close(fd_);
    throw Error(fmt::format("[flight] no memory for {} ranks: {}{}", ranks_, std::strerror(error),
                            advice_on_limit(error)));
  }
  for (int r = 0; r < ranks_; ++r) {
    reinterpret_cast<Block*>(static_cast<char*>(memory_) + static_cast<size_t>(r) * kBlockBytes)
        ->magic = Block::kMagic;
  }
}

Segment::~Segment() {
  munmap(memory_, static_cast<size_t>(ranks_) * kBlockBytes);
  close(fd_);
}

const Block& Segment::block(int local_rank) const {
  if (local_rank < 0 || local_rank >= ranks_) {
    throw ConfigError(fmt::format("[flight] local rank {} of {}", local_rank, ranks_));
  }
  return *reinterpret_cast<const Block*>(static_cast<const char*>(memory_) +
                                         static_cast<size_t>(local_rank) * kBlockBytes);
}

bool Segment::listens(int local_rank) const {
  return block(local_rank).trace.listens.load(std::memory_order_acquire) != 0;
}

pid_t Segment::process(int local_rank) const {
  return block(local_rank).trace.process.load(std::memory_order_acquire);
}

uint32_t Segment::stacks_told(int local_rank) const {
  return block(local_rank).trace.told.load(std::memory_order_acquire);
}

Log Segment::read(int local_rank) const {
  const Block& block = this->block(local_rank);
  Log log;
  log.calls = block.calls.load(std::memory_order_acquire);
  const uint32_t count = std::min(log.calls, kOperations);
  for (uint32_t call = log.calls - count + 1; call != log.calls + 1; ++call) {
    log.last.push_back(block.ring[call % kOperations]);
  }
  log.blocked_in = std::min(block.blocked_in.load(std::memory_order_acquire), log.calls);
  log.blocked_since_ns = block.blocked_since_ns.load(std::memory_order_relaxed);
  const uint64_t now = now_ns();
  for (size_t activity = 0; activity < log.busy_ns.size(); ++activity) {
    const uint64_t since = block.busy[activity].since_ns.load(std::memory_order_relaxed);
    log.busy_ns[activity] = block.busy[activity].total_ns.load(std::memory_order_relaxed) +
                            (since != 0 && now > since ? now - since : 0);
  }
  const uint32_t failed = block.failed.load(std::memory_order_acquire);
  if (failed != 0) {
    log.failure = {block.failed_at_ns, failed == 1 ? Blame::Own : Blame::Peer,
                   text_of(block.failure)};
  }
  const uint32_t compared = block.compared.load(std::memory_order_acquire);
  if (compared != 0 && compared % 2 == 0) {
    log.comparison = {block.compared_at_ns, text_of(block.comparison)};
  }
  log.stack = stack_of(block.trace);
  return log;
}

}  // namespace lockstep::flight
