// How a rank writes its stack. Everything below the handlers is async-signal-safe: it takes no lock
// and no memory, so that a rank that dies, or is busy, cannot be kept by it.
#include <dlfcn.h>
#include <execinfo.h>
#include <link.h>
#include <ucontext.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cerrno>
#include <csignal>
#include <cstring>

#include "core/flight/block.h"
#include "core/flight/last_work.h"

namespace lockstep::flight {
namespace {

constexpr int kDeepest = 256;
// Of a deep stack as many are kept at the inner end; the program's own functions are at the other.
constexpr int kInner = 24;
constexpr std::array kDeadly = {SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGABRT};

// Handlers find what they need here.
Block* g_block = nullptr;
pid_t g_pid = 0;
std::atomic<void (*)()> g_last_work{nullptr};
pid_t g_last_work_pid = 0;
std::array<char, 248> g_program{};
alignas(16) std::array<char, 64 * 1024> g_handler_stack{};

// The instruction at which the signal interrupted the thread; null on an unknown machine.
void* interrupted(const void* context) {
#if defined(__x86_64__)
  return reinterpret_cast<void*>(
      static_cast<const ucontext_t*>(context)->uc_mcontext.gregs[REG_RIP]);
#elif defined(__aarch64__)
  return reinterpret_cast<void*>(static_cast<const ucontext_t*>(context)->uc_mcontext.pc);
#else
  static_cast<void>(context);
  return nullptr;
#endif
}

void copy(char (&to)[248], const char* from) {
  const size_t length = strnlen(from, sizeof to - 1);
  std::memcpy(to, from, length);
  to[length] = '\0';
}

// _dl_find_object() takes no lock, unlike dladdr() (glibc's manual, Dynamic Linker Introspection).
void fill(Trace& trace, void* const* addresses, int count, const void* exact) {
  std::array<const link_map*, kModules> known{};
  uint32_t modules = 0;
  trace.frames = 0;
  for (int i = 0; i < count; ++i) {
    if (count > static_cast<int>(kFrames) && i == kInner)
      i = count - (static_cast<int>(kFrames) - kInner);
    // A return address may already belong to the next function.
    const auto address =
        reinterpret_cast<uintptr_t>(addresses[i]) - (addresses[i] == exact ? 0 : 1);
    dl_find_object found{};
    if (_dl_find_object(reinterpret_cast<void*>(address), &found) != 0) continue;
    const link_map* const map = found.dlfo_link_map;
    const uint32_t module = static_cast<uint32_t>(
        std::find(known.begin(), known.begin() + modules, map) - known.begin());
    if (module == modules) {
      if (modules == kModules) continue;
      known[modules++] = map;
      copy(trace.modules[module], map->l_name[0] == '\0' ? g_program.data() : map->l_name);
    }
    trace.module[trace.frames] = static_cast<uint8_t>(module);
    trace.offset[trace.frames++] = address - map->l_addr;
  }
}

// Of an exception that nothing catches: from the frames of the C++ runtime and the unwinder, which
// have called std::terminate(), to the one that has thrown. The unwinder's are there where it came
// to a function that is noexcept, as destructors are; it may have left functions by then.
int past_runtime(void* const* addresses, int first, int count) {
  const auto module_of = [addresses](int i) -> const link_map* {
    dl_find_object found{};
    return _dl_find_object(addresses[i], &found) == 0 ? found.dlfo_link_map : nullptr;
  };
  const link_map* const runtime = first < count ? module_of(first) : nullptr;
  if (runtime == nullptr || runtime->l_name[0] == '\0') return first;  // linked into the program
  const auto is_theirs = [&](const link_map* module) {
    return module == runtime ||
           (module != nullptr && std::strstr(module->l_name, "/libgcc_s.so") != nullptr);
  };
  int i = first;
  while (i < count && is_theirs(module_of(i))) ++i;
  return i < count ? i : first;
}

enum class Then { GoOn, End, Terminate };

// `exact`: the instruction at which a signal interrupted this thread; what lies further in is the
// handler.
void tell(int signal, const void* exact, Then then) {
  // A child of the rank has its handlers, too.
  if (g_block == nullptr || getpid() != g_pid) return;
  Trace& trace = g_block->trace;
  if (trace.writing.exchange(1, std::memory_order_acquire) != 0) return;
  std::array<void*, kDeepest> addresses;
  const int count = backtrace(addresses.data(), kDeepest);
  const auto end = addresses.begin() + count;
  const auto first = std::find(addresses.begin(), end, exact);
  int skipped = first == end ? 0 : static_cast<int>(first - addresses.begin());
  if (then == Then::Terminate) skipped = past_runtime(addresses.data(), skipped, count);
  trace.signal = signal;
  trace.at_ns = now_ns();
  fill(trace, addresses.data() + skipped, count - skipped, exact);
  trace.told.fetch_add(1, std::memory_order_release);
  if (then == Then::GoOn) trace.writing.store(0, std::memory_order_release);
}

void on_question(int, siginfo_t*, void* context) {
  const int error = errno;
  tell(0, interrupted(context), Then::GoOn);
  errno = error;
}

// The default action is back when it runs. An instruction that faulted does so again when this
// returns, so that a core file shows it; a signal that was sent has to be sent again.
void on_end(int signal, siginfo_t* info, void* context) {
  tell(signal, interrupted(context), Then::End);
  if (auto* const work = g_last_work.exchange(nullptr); work && getpid() == g_last_work_pid) work();
  if (info->si_code <= 0) raise(signal);
}

// False where the program has a handler of its own, which stays.
bool handle(int signal, void (*handler)(int, siginfo_t*, void*), int flags) {
  struct sigaction now {};
  if (sigaction(signal, nullptr, &now) != 0) return false;
  const bool is_own = (now.sa_flags & SA_SIGINFO) != 0 && now.sa_sigaction == handler;
  if (is_own) return true;
  if (now.sa_handler != SIG_DFL) return false;
  struct sigaction action {};
  action.sa_sigaction = handler;
  action.sa_flags = SA_SIGINFO | flags;
  return sigaction(signal, &action, nullptr) == 0;
}

void listen_to_deadly_signals() noexcept {
  for (const int signal : kDeadly) handle(signal, on_end, SA_ONSTACK | SA_NODEFER | SA_RESETHAND);
}

}  // namespace

void set_last_work(void (*work)()) noexcept {
  g_last_work_pid = getpid();
  g_last_work = work;
  listen_to_deadly_signals();
}

int question() noexcept { return SIGRTMAX - 5; }

void watch_stack(Block& block) noexcept {
  g_block = &block;
  g_pid = getpid();
  if (readlink("/proc/self/exe", g_program.data(), g_program.size() - 1) < 0) g_program[0] = '\0';
  std::array<void*, 1> any;
  backtrace(any.data(), 1);  // the first call loads a library
  stack_t now{};
  if (sigaltstack(nullptr, &now) == 0 && (now.ss_flags & SS_DISABLE) != 0) {
    const stack_t own{
        .ss_sp = g_handler_stack.data(), .ss_flags = 0, .ss_size = g_handler_stack.size()};
    sigaltstack(&own, nullptr);
  }
  listen_to_deadly_signals();
  const bool listens = handle(question(), on_question, SA_RESTART);
  block.trace.process.store(g_pid, std::memory_order_relaxed);
  block.trace.listens.store(listens ? 1 : 0, std::memory_order_release);
}

void tell_last_stack(Block& block, const void* handler_called_at) noexcept {
  if (g_block == &block) tell(SIGABRT, handler_called_at, Then::Terminate);
}

}  // namespace lockstep::flight
