// PMIx, over which Open MPI's mpirun talks to what it starts. The library is there wherever Open
// MPI is, and opened only where it is needed; what is declared here is its interface as the PMIx
// Standard (4.1) fixes it.
#include <dlfcn.h>
#include <fmt/format.h>

#include <array>
#include <condition_variable>
#include <cstdint>
#include <cstring>
#include <memory>
#include <mutex>
#include <optional>

#include "core/place/exchange.h"
#include "lockstep/core/error.h"

namespace lockstep {
namespace {

constexpr const char* kLibrary = "libpmix.so.2";
constexpr int kSuccess = 0, kAlreadyDone = -157;  // PMIX_OPERATION_SUCCEEDED
constexpr uint16_t kString = 3;                   // PMIX_STRING
constexpr uint8_t kGlobal = 3;                    // PMIX_GLOBAL

struct Process {  // pmix_proc_t
  std::array<char, 256> space;
  uint32_t rank;
};

struct Value {  // pmix_value_t
  uint16_t type;
  union {
    char* text;
    std::array<uint64_t, 4> any;
  };
};

using Key = std::array<char, 512>;  // pmix_key_t

[[noreturn]] void refuse(const std::string& what) {
  throw CommError(fmt::format(
      "[environment] {}; mpirun's ranks meet over PMIx, unless MASTER_ADDR and MASTER_PORT are set "
      "for all (-x MASTER_ADDR=... -x MASTER_PORT=...)",
      what));
}

class Library {
 public:
  Library() : handle_(dlopen(kLibrary, RTLD_NOW | RTLD_LOCAL)) {
    if (handle_ == nullptr) refuse(fmt::format("no {}: {}", kLibrary, dlerror()));
  }

  template <class Function>
  Function* function(const char* name) const {
    auto* const found = reinterpret_cast<Function*>(dlsym(handle_, name));
    if (found == nullptr) refuse(fmt::format("{} has no {}", kLibrary, name));
    return found;
  }

 private:
  void* const handle_;  // stays: its threads may run
};

void check(const char* call, int status) {
  if (status != kSuccess && status != kAlreadyDone) {
    refuse(fmt::format("{} failed with status {}", call, status));
  }
}

// The end of a fence, which the library reports from a thread of its own.
struct Fence {
  std::mutex mutex;
  std::condition_variable over;
  std::optional<int> status;

  static void done(int status, void* data) {
    // The thread that waited may have left; this owns the fence then.
    const std::unique_ptr<std::shared_ptr<Fence>> own(static_cast<std::shared_ptr<Fence>*>(data));
    const std::lock_guard lock((*own)->mutex);
    (*own)->status = status;
    (*own)->over.notify_all();
  }
};

void await_all(const Library& pmix, std::chrono::milliseconds timeout) {
  auto* const fence_nb =
      pmix.function<int(const Process*, size_t, const void*, size_t, void (*)(int, void*), void*)>(
          "PMIx_Fence_nb");
  const auto fence = std::make_shared<Fence>();
  auto own = std::make_unique<std::shared_ptr<Fence>>(fence);
  const int begun = fence_nb(nullptr, 0, nullptr, 0, &Fence::done, own.get());
  check("PMIx_Fence_nb", begun);
  if (begun == kAlreadyDone) return;
  (void)own.release();
  std::unique_lock lock(fence->mutex);
  if (!fence->over.wait_for(lock, timeout, [&] { return fence->status.has_value(); })) {
    refuse(fmt::format("not every rank came within {:g} s: is every one the same program?",
                       static_cast<double>(timeout.count()) * 1e-3));
  }
  check("PMIx_Fence_nb", *fence->status);
}

}  // namespace

std::string exchange_over_pmix(const std::string& word, std::chrono::milliseconds timeout) {
  const Library pmix;
  Process own{};
  check("PMIx_Init", pmix.function<int(Process*, void*, size_t)>("PMIx_Init")(&own, nullptr, 0));
  Key key{};
  std::strncpy(key.data(), "lockstep.meeting", key.size() - 1);
  if (!word.empty()) {
    std::string text = word;
    Value value{.type = kString, .any = {}};
    value.text = text.data();
    check("PMIx_Put", pmix.function<int(uint8_t, const char*, Value*)>("PMIx_Put")(
                          kGlobal, key.data(), &value));
  }
  check("PMIx_Commit", pmix.function<int()>("PMIx_Commit")());
  await_all(pmix, timeout);
  Process first = own;
  first.rank = 0;
  Value* heard = nullptr;
  check("PMIx_Get", pmix.function<int(const Process*, const char*, const void*, size_t, Value**)>(
                        "PMIx_Get")(&first, key.data(), nullptr, 0, &heard));
  if (heard == nullptr || heard->type != kString || heard->text == nullptr) {
    refuse("PMIx_Get gave no text");
  }
  const std::string said = heard->text;
  pmix.function<int(const void*, size_t)>("PMIx_Finalize")(nullptr, 0);
  return said;
}

}  // namespace lockstep
