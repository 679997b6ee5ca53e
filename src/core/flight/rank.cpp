// The rank's side of the flight recorder.
#include <fcntl.h>
#include <fmt/format.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <ctime>
#include <fstream>
#include <limits>
#include <mutex>
#include <nlohmann/json.hpp>

#include "core/control.h"
#include "core/flight/block.h"
#include "core/flight/recording.h"
#include "core/process/own_process.h"
#include "lockstep/core/environment.h"

namespace lockstep::flight {
namespace {

std::terminate_handler g_before = nullptr;

Block* block() noexcept;

// Reports an uncaught exception before the process aborts. The stack is still that of the throw.
[[noreturn]] void on_terminate() {
  if (Block* const own = block()) tell_last_stack(*own, __builtin_return_address(0));
  if (const auto error = std::current_exception()) {
    try {
      std::rethrow_exception(error);
    } catch (const std::exception& known) {
      report_failure(fmt::format("an uncaught exception: {}", known.what()));
    } catch (...) {
      report_failure("an uncaught exception of no standard type");
    }
  }
  if (g_before != nullptr) g_before();
  std::abort();
}

// This rank's part of the launcher's segment; null when there is none, or it is something else.
Block* find_block() noexcept try {
  const auto fd = env_int(kVariable, 3, std::numeric_limits<int>::max());
  const auto rank = env_int("LOCAL_RANK", 0, 1 << 16);
  if (!fd || !rank || !is_launchers_rank()) return nullptr;
  struct stat status {};
  const off_t offset = static_cast<off_t>(*rank) * static_cast<off_t>(kBlockBytes);
  if (fstat(static_cast<int>(*fd), &status) != 0 ||
      status.st_size < offset + static_cast<off_t>(kBlockBytes)) {
    return nullptr;
  }
  void* memory =
      mmap(nullptr, kBlockBytes, PROT_READ | PROT_WRITE, MAP_SHARED, static_cast<int>(*fd), offset);
  if (memory == MAP_FAILED) return nullptr;
  if (static_cast<Block*>(memory)->magic != Block::kMagic) {
    munmap(memory, kBlockBytes);
    return nullptr;
  }
  g_before = std::set_terminate(on_terminate);
  watch_stack(*static_cast<Block*>(memory));
  return static_cast<Block*>(memory);
} catch (const std::exception&) {
  return nullptr;  // another program's variable: recording is no reason to fail
}

// The rank; a child of it is none.
const OwnProcess& home() noexcept {
  static const OwnProcess process;
  return process;
}

Block* block() noexcept {
  static Block* const instance = find_block();
  return home().is_here() ? instance : nullptr;
}

// The file of torchrun's workers, {"message": {"message": ..., "extraInfo": {...}}}, whole or not
// at all: torchrun cannot read half of one.
void write_error_file(std::string_view text) {
  const auto path = env_text("TORCHELASTIC_ERROR_FILE");
  if (!path || !is_launchers_rank()) return;
  const nlohmann::json error = {
      {"message",
       {{"message", text},
        {"extraInfo",
         {{"py_callstack", text}, {"timestamp", std::to_string(std::time(nullptr))}}}}}};
  const std::string unfinished = fmt::format("{}.{}", *path, getpid());
  std::ofstream file(unfinished);
  file << error.dump(-1, ' ', false, nlohmann::json::error_handler_t::replace);
  file.close();
  if (!file || std::rename(unfinished.c_str(), path->c_str()) != 0) unlink(unfinished.c_str());
}

}  // namespace

void attach() noexcept { block(); }

namespace {

// Other threads announce calls, too: a checkpoint that is written meanwhile has a group of its own.
std::mutex g_calls;

// For the launcher; 0 where there is none.
uint32_t announce(const Operation& operation) noexcept {
  Block* const own = block();
  if (own == nullptr) return 0;
  const std::lock_guard lock(g_calls);
  uint32_t call = own->calls.load(std::memory_order_relaxed) + 1;
  if (call == 0) ++call;  // the number of no call
  Operation& entry = own->ring[call % kOperations];
  entry = operation;
  own->calls.store(call, std::memory_order_release);
  return call;
}

// That call's; nothing where nothing is recorded, or when its place has gone to a later one.
template <class Change>
void with_entry_of(uint32_t call, const Change& change) noexcept {
  Block* const own = block();
  if (own == nullptr || call == 0) return;
  const std::lock_guard lock(g_calls);
  const bool is_there = own->calls.load(std::memory_order_relaxed) - call < kOperations;
  if (is_there) change(own->ring[call % kOperations]);
}

}  // namespace

uint32_t begin(const Operation& operation) noexcept {
  const uint32_t call = announce(operation);
  return is_recording() ? record_begin(operation, call) : call;
}

void number(uint32_t call, uint64_t in_group) noexcept {
  with_entry_of(call, [&](Operation& entry) { entry.number = static_cast<uint32_t>(in_group); });
}

void end(uint32_t call, uint64_t at_ns) noexcept {
  with_entry_of(call, [at_ns](Operation& entry) { entry.end_ns = at_ns; });
  if (call != 0 && is_recording()) record_end(call, at_ns);
}

namespace {

std::array<std::atomic<uint64_t>, kActivities> g_busy_ns{};
thread_local bool t_in_span = false;  // also where nothing is counted

}  // namespace

std::array<uint64_t, kActivities> own_busy_ns() noexcept {
  std::array<uint64_t, kActivities> busy{};
  for (size_t i = 0; i < kActivities; ++i) busy[i] = g_busy_ns[i].load(std::memory_order_relaxed);
  return busy;
}

void exclude_this_thread() noexcept { t_in_span = true; }

Span::Span(Activity activity, uint32_t call, uint64_t since_ns) noexcept
    : activity_(activity), outermost_(false) {
  const uint64_t now = since_ns != 0 ? since_ns : now_ns();
  if (!t_in_span) {
    t_in_span = true;
    since_ns_ = now;
  }
  Block* const own = activity == Activity::Checkpoint ? nullptr : block();
  if (own == nullptr) return;
  Block::Busy& busy = own->busy[static_cast<uint32_t>(activity)];
  uint64_t expected = 0;
  outermost_ = busy.since_ns.load(std::memory_order_relaxed) == 0 &&
               busy.since_ns.compare_exchange_strong(expected, now, std::memory_order_acquire);
  if (call == 0 || activity != Activity::Communication || !outermost_) return;
  own->blocked_since_ns.store(now, std::memory_order_relaxed);
  own->blocked_in.store(call, std::memory_order_release);
}

void Span::end(uint64_t at_ns) noexcept {
  if (!outermost_ && since_ns_ == 0) return;
  const uint64_t now = at_ns != 0 ? at_ns : now_ns();
  if (since_ns_ != 0) {
    t_in_span = false;
    g_busy_ns[static_cast<uint32_t>(activity_)].fetch_add(now - since_ns_,
                                                          std::memory_order_relaxed);
    if (is_recording()) {
      record({activity_, static_cast<uint32_t>(syscall(SYS_gettid)), since_ns_, now});
    }
    since_ns_ = 0;
  }
  Block* const own = outermost_ ? block() : nullptr;
  outermost_ = false;
  if (own == nullptr) return;
  Block::Busy& busy = own->busy[static_cast<uint32_t>(activity_)];
  // Until since_ns is 0 again, no other thread writes the two. No time is counted twice meanwhile.
  const uint64_t since = busy.since_ns.load(std::memory_order_relaxed);
  busy.since_ns.store(now, std::memory_order_relaxed);
  busy.total_ns.store(busy.total_ns.load(std::memory_order_relaxed) + now - since,
                      std::memory_order_relaxed);
  if (activity_ == Activity::Communication) own->blocked_in.store(0, std::memory_order_release);
  busy.since_ns.store(0, std::memory_order_release);
}

void note_comparison(std::string_view text) noexcept try {
  Block* const own = block();
  if (own == nullptr) return;
  static std::mutex mutex;
  const std::lock_guard lock(mutex);
  own->compared.fetch_add(1, std::memory_order_acq_rel);
  own->compared_at_ns = now_ns();
  const size_t length = std::min(text.size(), sizeof own->comparison - 1);
  std::memcpy(own->comparison, text.data(), length);
  own->comparison[length] = '\0';
  own->compared.fetch_add(1, std::memory_order_release);
} catch (const std::exception&) {
  // It is for people who look for a cause; training continues.
}

void report_failure(std::string_view text, Blame blame) noexcept try {
  if (!home().is_here()) return;
  static std::mutex mutex;
  static Blame reported{};
  const std::lock_guard lock(mutex);
  if (reported == Blame::Own || reported == blame) return;
  reported = blame;
  text = text.substr(0, text.find("\nException raised from "));  // libtorch's backtrace
  if (Block* const own = block()) {
    own->failed.store(0, std::memory_order_release);
    own->failed_at_ns = now_ns();
    const size_t length = std::min(text.size(), sizeof own->failure - 1);
    std::memcpy(own->failure, text.data(), length);
    own->failure[length] = '\0';
    own->failed.store(static_cast<uint32_t>(blame), std::memory_order_release);
  }
  write_error_file(text);
} catch (const std::exception&) {
  // There is no better place to say it.
}

}  // namespace lockstep::flight
