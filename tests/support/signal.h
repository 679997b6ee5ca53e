// What one rank tells another outside the group.
#pragma once

#include <gtest/gtest.h>
#include <unistd.h>

namespace lockstep::test {

// Made before the ranks are.
class Signal {
 public:
  Signal() { EXPECT_EQ(pipe(ends_), 0); }
  ~Signal() {
    close(ends_[0]);
    close(ends_[1]);
  }
  Signal(const Signal&) = delete;
  Signal& operator=(const Signal&) = delete;

  void give() const { EXPECT_EQ(write(ends_[1], "", 1), 1); }
  // Takes one.
  void wait() const {
    char byte;
    EXPECT_EQ(read(ends_[0], &byte, 1), 1);
  }

 private:
  int ends_[2];
};

}  // namespace lockstep::test
