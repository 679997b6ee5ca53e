// A child of a rank.
#pragma once

#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

namespace lockstep::test {

// Set in such a child, which keeps its copies of what belongs to its parent: no leaks.
inline bool is_child = false;

// Runs `body` in a child made by fork(), which may end itself. What fails there fails the test, and
// so does a child that ends in another way than with 0, or not at all.
template <class Body>
void in_a_child(const Body& body) {
  const pid_t pid = fork();
  if (pid == 0) {
    is_child = true;
    alarm(30);
    try {
      body();
    } catch (const std::exception& error) {
      ADD_FAILURE() << "in a child: " << error.what();
    }
    _exit(0);
  }
  int status = -1;
  EXPECT_EQ(waitpid(pid, &status, 0), pid);
  EXPECT_EQ(status, 0) << "a child's wait status";
}

}  // namespace lockstep::test
