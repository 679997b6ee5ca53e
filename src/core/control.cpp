#include "core/control.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstring>
#include <limits>
#include <string_view>
#include <utility>

#include "core/files/fd.h"
#include "lockstep/core/environment.h"
#include "lockstep/core/error.h"

namespace lockstep {
namespace {

constexpr uint64_t kMagic = 0x3230'6c74'636b'6c00;  // "\0lkctl02", read as a little-endian number
constexpr uint32_t kEnded = 1u << 31;               // above every bit of a wait status
constexpr int kMostLocalRanks = 1 << 16;
constexpr int kSeals = F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_FUTURE_WRITE | F_SEAL_SEAL;

[[noreturn]] void fail(const char* call) {
  const int error = errno;
  throw Error(
      fmt::format("[control] {}: {}{}", call, std::strerror(error), advice_on_limit(error)));
}

}  // namespace

bool is_launchers_rank() {
  const auto port = env_text("LOCKSTEP_MASTER_PORT");
  return !port || port == env_text("MASTER_PORT");
}

struct Control::Segment {
  uint64_t magic;
  uint32_t local_ranks;
  std::atomic<uint32_t> reason_bytes;  // written after them
  char reason[256];
  alignas(64) std::atomic<uint32_t> failures;  // a line of its own: every waiting rank polls it
  alignas(64) std::atomic<uint32_t> ends[1];   // one per rank: 0, or kEnded | wait status

  static size_t bytes(int local_ranks) {
    return sizeof(Segment) + (static_cast<size_t>(local_ranks) - 1) * sizeof(ends[0]);
  }
};

std::string describe_exit(int wait_status) {
  if (!WIFSIGNALED(wait_status)) {
    return fmt::format("exited with status {}", WEXITSTATUS(wait_status));
  }
  const int number = WTERMSIG(wait_status);
  const char* name = sigabbrev_np(number);
  return name ? fmt::format("was killed by SIG{}", name)
              : fmt::format("was killed by signal {}", number);
}

Control Control::create(int local_ranks) {
  if (local_ranks < 1 || local_ranks > kMostLocalRanks) {
    throw ConfigError(
        fmt::format("[control] {} ranks on this host: need 1 to {}", local_ranks, kMostLocalRanks));
  }
  Control control;
  control.creator_ = true;
  control.fd_ = memfd_create("lockstep-control", MFD_CLOEXEC | MFD_ALLOW_SEALING);
  if (control.fd_ < 0) fail("memfd_create");
  const size_t bytes = Segment::bytes(local_ranks);
  if (ftruncate(control.fd_, static_cast<off_t>(bytes)) != 0) fail("ftruncate");
  void* memory = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, control.fd_, 0);
  if (memory == MAP_FAILED) fail("mmap");
  control.segment_ = static_cast<Segment*>(memory);  // zeros: failures 0, no rank has ended
  control.segment_->local_ranks = static_cast<uint32_t>(local_ranks);
  control.segment_->magic = kMagic;
  if (fcntl(control.fd_, F_ADD_SEALS, kSeals) != 0) fail("sealing a memfd");
  return control;
}

std::optional<Control> Control::from_env() {
  const auto number = env_int(kVariable, 0, std::numeric_limits<int>::max());
  if (!number || !is_launchers_rank()) return std::nullopt;
  const int fd = static_cast<int>(*number);
  const auto refuse = [fd](std::string_view reason) {
    return ConfigError(fmt::format(
        "[control] {}={}: {}. The launcher sets it together with the descriptor; unset it to run "
        "without one, and keep the descriptor open in a wrapper script",
        kVariable, fd, reason));
  };
  // Seals first: they promise that the size read next stays, so that the mapping can not fault.
  const int seals = fcntl(fd, F_GET_SEALS);
  if (seals < 0) {
    throw refuse(errno == EBADF ? "no such open descriptor" : "not a control segment");
  }
  struct stat status;
  if ((seals & kSeals) != kSeals || fstat(fd, &status) != 0) throw refuse("not a control segment");
  const auto bytes = static_cast<size_t>(status.st_size);
  if (bytes < sizeof(Segment) || bytes > Segment::bytes(kMostLocalRanks)) {
    throw refuse(fmt::format("not a control segment: {} bytes", bytes));
  }
  void* memory = mmap(nullptr, bytes, PROT_READ, MAP_SHARED, fd, 0);
  if (memory == MAP_FAILED) throw refuse(std::strerror(errno));
  auto* segment = static_cast<Segment*>(memory);
  const auto ranks = segment->local_ranks;
  if (segment->magic != kMagic || ranks < 1 || ranks > kMostLocalRanks ||
      Segment::bytes(static_cast<int>(ranks)) != bytes) {
    munmap(memory, bytes);
    throw refuse("not a control segment of this version of lockstep");
  }
  Control control;
  control.fd_ = fd;
  control.segment_ = segment;
  return control;
}

Control::Control(Control&& other) noexcept
    : segment_(std::exchange(other.segment_, nullptr)),
      fd_(std::exchange(other.fd_, -1)),
      creator_(std::exchange(other.creator_, false)) {}

Control& Control::operator=(Control&& other) noexcept {
  std::swap(segment_, other.segment_);
  std::swap(fd_, other.fd_);
  std::swap(creator_, other.creator_);
  return *this;
}

Control::~Control() {
  if (segment_) munmap(segment_, Segment::bytes(local_ranks()));
  if (creator_ && fd_ >= 0) close(fd_);
}

int Control::local_ranks() const { return static_cast<int>(segment_->local_ranks); }

uint32_t Control::failures() const noexcept {
  return segment_->failures.load(std::memory_order_acquire);
}

std::optional<std::string> Control::fate(int local_rank) const {
  check_rank(local_rank);
  const uint32_t end = segment_->ends[local_rank].load(std::memory_order_acquire);
  if ((end & kEnded) == 0) return std::nullopt;
  return describe_exit(static_cast<int>(end & ~kEnded));
}

void Control::record_exit(int local_rank, int wait_status) {
  check_rank(local_rank);
  writable().ends[local_rank].store(kEnded | static_cast<uint32_t>(wait_status),
                                    std::memory_order_release);
}

void Control::explain(std::string_view reason) {
  Segment& segment = writable();
  if (segment.reason_bytes.load(std::memory_order_relaxed) != 0) return;
  const size_t bytes = reason.copy(segment.reason, sizeof segment.reason - 1);
  segment.reason_bytes.store(static_cast<uint32_t>(bytes), std::memory_order_release);
}

std::string Control::because() const {
  const std::string why = reason();
  return why.empty() ? why : " (" + why + ")";
}

std::string Control::reason() const {
  const size_t bytes = segment_->reason_bytes.load(std::memory_order_acquire);
  return {segment_->reason, std::min(bytes, sizeof segment_->reason)};
}

void Control::report_failure() { writable().failures.fetch_add(1, std::memory_order_release); }

Control::Segment& Control::writable() const {
  if (!creator_) throw Error("[control] only the launcher that created a segment writes to it");
  return *segment_;
}

void Control::check_rank(int local_rank) const {
  if (local_rank < 0 || local_rank >= local_ranks()) {
    throw ConfigError(fmt::format("[control] local rank {} of {}", local_rank, local_ranks()));
  }
}

}  // namespace lockstep
