#include "core/control.h"

#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <csignal>
#include <cstdlib>
#include <functional>

#include "lockstep/core/error.h"

namespace lockstep {
namespace {

using ::testing::HasSubstr;

class ControlTest : public ::testing::Test {
 protected:
  static Control attach(int fd) {
    setenv(Control::kVariable, std::to_string(fd).c_str(), 1);
    return Control::from_env().value();
  }
  static void expect_refused(const std::string& value, const std::string& reason) {
    setenv(Control::kVariable, value.c_str(), 1);
    try {
      Control::from_env();
      FAIL() << value;
    } catch (const ConfigError& error) {
      EXPECT_THAT(error.what(), HasSubstr("LOCKSTEP_CONTROL_FD"));
      EXPECT_THAT(error.what(), HasSubstr(reason));
    }
  }
  ~ControlTest() override { unsetenv(Control::kVariable); }
};

// How a real child ends that does `last`.
int wait_status_of(const std::function<void()>& last) {
  const pid_t pid = fork();
  if (pid == 0) {
    last();
    _exit(0);
  }
  int status = 0;
  waitpid(pid, &status, 0);
  return status;
}

TEST_F(ControlTest, WithoutALauncherThereIsNone) { EXPECT_FALSE(Control::from_env()); }

TEST_F(ControlTest, ARankSeesWhatTheLauncherRecords) {
  Control launcher = Control::create(3);
  const Control rank = attach(launcher.fd());
  EXPECT_EQ(rank.local_ranks(), 3);
  EXPECT_EQ(rank.failures(), 0u);
  EXPECT_EQ(rank.fate(1), std::nullopt);

  launcher.record_exit(1, wait_status_of([] { _exit(3); }));
  EXPECT_EQ(rank.failures(), 0u);
  launcher.report_failure();
  EXPECT_EQ(rank.failures(), 1u);
  EXPECT_EQ(rank.fate(1), "exited with status 3");
  EXPECT_EQ(rank.fate(0), std::nullopt);

  launcher.record_exit(2, wait_status_of([] { raise(SIGKILL); }));
  EXPECT_EQ(rank.fate(2), "was killed by SIGKILL");
}

TEST_F(ControlTest, ItIsNotThatOfARankThatARankHasStarted) {
  const Control launcher = Control::create(1);
  setenv(Control::kVariable, std::to_string(launcher.fd()).c_str(), 1);
  setenv("LOCKSTEP_MASTER_PORT", "29500", 1);
  for (const char* port : {"29500", "29501"}) {
    setenv("MASTER_PORT", port, 1);
    EXPECT_EQ(Control::from_env().has_value(), port == std::string("29500"));
  }
  unsetenv("LOCKSTEP_MASTER_PORT");
  EXPECT_TRUE(Control::from_env());  // another launcher's, or an older one's
  unsetenv("MASTER_PORT");
}

TEST_F(ControlTest, AStatusOfZeroIsAnEnd) {
  Control launcher = Control::create(1);
  launcher.record_exit(0, 0);
  EXPECT_EQ(launcher.fate(0), "exited with status 0");
}

TEST_F(ControlTest, ItSeesThroughAForkAndOutlivesItsCreator) {
  Control launcher = Control::create(1);
  const Control rank = attach(launcher.fd());
  { const Control gone = std::move(launcher); }
  EXPECT_EQ(rank.failures(), 0u);
}

TEST_F(ControlTest, ARankCannotWrite) {
  Control launcher = Control::create(1);
  Control rank = attach(launcher.fd());
  EXPECT_THROW(rank.report_failure(), Error);
  EXPECT_THROW(rank.record_exit(0, 0), Error);
  EXPECT_EQ(mmap(nullptr, 1, PROT_WRITE, MAP_SHARED, launcher.fd(), 0), MAP_FAILED);
  EXPECT_NE(ftruncate(launcher.fd(), 0), 0);
  EXPECT_LT(write(launcher.fd(), "x", 1), 0);
}

TEST_F(ControlTest, RanksOutOfRangeAreRefused) {
  Control control = Control::create(2);
  for (const int rank : {-1, 2}) {
    EXPECT_THROW(control.fate(rank), ConfigError);
    EXPECT_THROW(control.record_exit(rank, 0), ConfigError);
  }
  EXPECT_THROW(Control::create(0), ConfigError);
  EXPECT_THROW(Control::create(1 << 20), ConfigError);
}

TEST_F(ControlTest, GarbageIsRefused) {
  expect_refused("x", "is not a whole number");
  expect_refused("-1", "is not a whole number");
  expect_refused("99999999999", "is not a whole number");
  expect_refused("54321", "no such open descriptor");
}

TEST_F(ControlTest, AnotherKindOfDescriptorIsRefused) {
  int ends[2];
  ASSERT_EQ(pipe(ends), 0);
  expect_refused(std::to_string(ends[0]), "not a control segment");
  close(ends[0]);
  close(ends[1]);
  FILE* file = tmpfile();
  expect_refused(std::to_string(fileno(file)), "not a control segment");
  fclose(file);
}

TEST_F(ControlTest, AForeignSegmentIsRefused) {
  constexpr int kAllSeals = F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_FUTURE_WRITE | F_SEAL_SEAL;
  for (const int bytes : {0, 1, 64, 4096, 1 << 26}) {
    const int fd = memfd_create("foreign", MFD_ALLOW_SEALING);
    ASSERT_EQ(ftruncate(fd, bytes), 0);
    expect_refused(std::to_string(fd), "not a control segment");  // it could still shrink
    ASSERT_EQ(fcntl(fd, F_ADD_SEALS, kAllSeals), 0);
    expect_refused(std::to_string(fd), "not a control segment");
    close(fd);
  }
}

TEST(Control, TheFirstReasonStays) {
  Control control = Control::create(1);
  EXPECT_EQ(control.reason() + control.because(), "");
  control.explain("rank 3 on host2 was killed by SIGKILL");
  control.explain("an echo of it");
  control.report_failure();
  EXPECT_EQ(control.reason(), "rank 3 on host2 was killed by SIGKILL");
  EXPECT_EQ(control.because(), " (rank 3 on host2 was killed by SIGKILL)");
  Control other = Control::create(1);
  other.explain(std::string(1000, 'x'));
  EXPECT_EQ(other.reason(), std::string(255, 'x'));
}

}  // namespace
}  // namespace lockstep
