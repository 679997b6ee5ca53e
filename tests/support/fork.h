// A child of a rank.
#pragma once

#include <gtest/gtest.h>
#include <poll.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <csignal>
#include <cstdlib>

#ifdef __SANITIZE_ADDRESS__
extern "C" void __sanitizer_purge_allocator();
#endif

namespace lockstep::test {

// Set in such a child, which keeps its copies of what belongs to its parent: no leaks.
inline bool is_child = false;

#ifndef __SANITIZE_ADDRESS__
inline pid_t fork_beside_threads() { return fork(); }
#else
// A lock of AddressSanitizer's allocator that another thread had during fork() stays locked in the
// child for ever (the C library's allocator and newer sanitizers release theirs). Such a child is
// killed before it runs any of the test, and another one is made.
inline pid_t fork_beside_threads() {
  for (;;) {
    std::array<int, 2> ends;
    if (socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends.data()) != 0) return -1;
    const auto [of_parent, of_child] = ends;
    char byte = 0;
    const pid_t pid = fork();
    if (pid == 0) {
      close(of_parent);
      free(malloc(1 << 20));          // takes the lock of large blocks
      __sanitizer_purge_allocator();  // takes all others
      if (::write(of_child, &byte, 1) != 1 || ::read(of_child, &byte, 1) != 1) _exit(99);
      close(of_child);
      return 0;
    }
    close(of_child);
    pollfd answer{of_parent, POLLIN, 0};
    const bool is_over = poll(&answer, 1, 2000) == 1;
    if (is_over && ::read(of_parent, &byte, 1) == 1) (void)!::write(of_parent, &byte, 1);
    close(of_parent);
    if (is_over || pid < 0) return pid;
    kill(pid, SIGKILL);
    waitpid(pid, nullptr, 0);
  }
}
#endif

// Runs `body` in a child made by fork(), which may end itself. What fails there fails the test, and
// so does a child that ends in another way than with 0, or not within `seconds`.
template <class Body>
void in_a_child(const Body& body, unsigned seconds = 60) {
  const pid_t pid = fork_beside_threads();
  if (pid == 0) {
    is_child = true;
    alarm(seconds);
    try {
      body();
    } catch (const std::exception& error) {
      ADD_FAILURE() << "in a child: " << error.what();
    }
    _exit(testing::Test::HasFailure() ? 1 : 0);
  }
  int status = -1;
  EXPECT_EQ(waitpid(pid, &status, 0), pid);
  EXPECT_EQ(status, 0) << "a child's wait status";
}

}  // namespace lockstep::test
