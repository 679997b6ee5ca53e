// What happens between fork() and execve().
#include "launch/process/child.h"

#include <gtest/gtest.h>
#include <poll.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <cstdlib>
#include <filesystem>
#include <new>

#include "support/folder.h"

namespace {

constexpr int kAllocated = 99;

// The process that may use operator new; 0: all may.
std::atomic<pid_t> allocates{0};

void* allocate(size_t size) {
  const pid_t only = allocates.load();
  if (only != 0 && only != getpid()) _exit(kAllocated);
  if (void* memory = std::malloc(size == 0 ? 1 : size)) return memory;
  throw std::bad_alloc();
}

}  // namespace

// Not inline: a compiler that sees malloc() in one half and free() in the other takes them for a
// mismatch where it inlines only one.
[[gnu::noinline]] void* operator new(size_t size) { return allocate(size); }
[[gnu::noinline]] void* operator new[](size_t size) { return allocate(size); }
[[gnu::noinline]] void* operator new(size_t size, const std::nothrow_t&) noexcept {
  return std::malloc(size);
}
[[gnu::noinline]] void* operator new[](size_t size, const std::nothrow_t&) noexcept {
  return std::malloc(size);
}
[[gnu::noinline]] void operator delete(void* memory) noexcept { std::free(memory); }
[[gnu::noinline]] void operator delete[](void* memory) noexcept { std::free(memory); }
[[gnu::noinline]] void operator delete(void* memory, size_t) noexcept { std::free(memory); }
[[gnu::noinline]] void operator delete[](void* memory, size_t) noexcept { std::free(memory); }

namespace lockstep::launch {
namespace {

// The exit status of a rank; no process but this one allocates until it has started.
int run(const ChildSpec& spec) {
  const Signals signals;
  allocates = getpid();
  const Child child = start_child(spec, signals);
  allocates = 0;
  pollfd starting = {child.starting.get(), POLLIN, 0};
  poll(&starting, 1, -1);
  int status = 0;
  waitpid(child.pid, &status, 0);
  return WIFEXITED(status) ? WEXITSTATUS(status) : -1;
}

// Another thread of the launcher may hold the allocator's lock during fork(): under
// AddressSanitizer one start in several hundred never came to its program.
TEST(Child, AllocatesNothingBeforeItsProgramRuns) {
  const test::Folder folder(test::Folder::On::Disk);
  const std::string path = folder / "script";
  const ChildSpec spec = {
      .path = path, .command = {"script", "7"}, .environment = {"A=1"}, .cores = {}};
  for (const std::string first :
       {"#!/bin/sh\n", ""}) {  // "": execve() refuses it, a shell does not
    test::write(path, first + "test \"$A\" = 1 && exit $1\n");
    std::filesystem::permissions(path, std::filesystem::perms::owner_all);
    EXPECT_EQ(run(spec), 7) << first;
  }
}

}  // namespace
}  // namespace lockstep::launch
