// What cannot be started, or is asked for wrongly: one clear error, before any rank runs.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cstdlib>
#include <fstream>

#include "launch/job.h"
#include "launch/job/program.h"
#include "launch/job/run.h"
#include "support/folder.h"
#include "support/fork.h"
#include "support/thrown.h"

namespace lockstep::launch::testing {
namespace {

using ::testing::HasSubstr;
using ::testing::StartsWith;

class StartTest : public ::testing::Test {
 protected:
  const test::Folder folder_{test::Folder::On::Disk};

  std::string file(const std::string& content, mode_t mode) {
    const std::string path = folder_ / "program";
    std::ofstream(path) << content;
    chmod(path.c_str(), mode);
    return path;
  }

  // One line that begins with the program's name, and the exit status.
  void expect_refused(const std::string& program, int exit_code, const std::string& reason) {
    const Result result = Job({"run", "--nproc-per-node", "2", program}).wait();
    EXPECT_EQ(result.exit_code, exit_code);
    EXPECT_EQ(lines_of(result.err).size(), 1u) << result.err;
    EXPECT_THAT(result.err, StartsWith("lockstep: [run] cannot start '"));
    EXPECT_THAT(result.err, HasSubstr(reason));
    EXPECT_EQ(result.out, "");
  }
};

TEST_F(StartTest, NoSuchProgramInPath) {
  expect_refused("no-such-program-anywhere", 127, "no such program in PATH");
}
TEST_F(StartTest, NoSuchFile) { expect_refused(folder_ / "x", 127, "No such file or directory"); }
TEST_F(StartTest, EmptyName) { expect_refused("", 127, "the name is empty"); }
TEST_F(StartTest, Directory) { expect_refused(folder_.path(), 126, "it is a directory"); }
TEST_F(StartTest, NotExecutable) {
  expect_refused(file("#!/bin/sh\n", 0644), 126, "permission denied; if it is a program: chmod +x");
}
TEST_F(StartTest, MissingInterpreter) {
  expect_refused(file("#! /no/such/python -u\n", 0755), 126, "asks for '/no/such/python'");
}
TEST_F(StartTest, DamagedBinary) {
  expect_refused(file("\x7f"
                      "ELF damaged",
                      0755),
                 126, "built for another kind of machine");
}

TEST_F(StartTest, APythonScriptIsNoProgram) {
  const std::string path = folder_ / "train.py";
  std::ofstream(path) << "print('x')\n";
  expect_refused(path, 126, "it is a Python script: write python3 " + path);
  chmod(path.c_str(), 0755);  // no #! line: the shell would run it
  expect_refused(path, 126, "it is a Python script: write python3 " + path);
  const std::string here = "cd " + folder_.path() + "; exec " + LOCKSTEP_BINARY_DIR "/bin/lockstep";
  EXPECT_EQ(std::system((here + " run train.py 2> message").c_str()) >> 8, 126);
  expect_refused(folder_ / "none.py", 127, "No such file or directory");
  std::ofstream(path) << "#!/bin/sh\necho its own interpreter\n";
  EXPECT_EQ(Job({"run", path}).wait().out, "its own interpreter\n");
}
TEST_F(StartTest, AScriptWithWindowsLineEndsIsToldSo) {
  const std::string path = file("#!/bin/sh\r\necho x\r\n", 0755);
  expect_refused(path, 126, "it has Windows line ends: sed -i 's/\\r$//' " + path);
  expect_refused(file("#!/no/such/shell\r\n", 0755), 126, "asks for '/no/such/shell'");
}
TEST_F(StartTest, AScriptWithoutFirstLineRunsInTheShell) {
  EXPECT_EQ(Job({"run", file("echo $1", 0755), "argument"}).wait().out, "argument\n");
}

TEST_F(StartTest, AProgramIsFoundInPath) {
  const std::string path = file("#!/bin/sh\necho found as $0\n", 0755);
  const Result result = Job({"run", "program"},
                            {.environment = {{"PATH", "/no/such:" + folder_.path() + ":/usr/bin"}}})
                            .wait();
  EXPECT_EQ(result.out, "found as " + path + "\n");
}

// As /root/bin, which `su` leaves in PATH.
TEST_F(StartTest, AFolderOfPathThatMayNotBeSearchedHoldsNoProgram) {
  file("#!/bin/sh\n", 0755);
  chmod(folder_.path().c_str(), 0);
  test::in_a_child([&] {
    setenv("PATH", folder_.path().c_str(), 1);
    EXPECT_EQ(seteuid(geteuid() == 0 ? 65534 : geteuid()), 0);
    EXPECT_THAT(test::message_of<StartError>([] { find_program("program"); }),
                HasSubstr("no such program in PATH"));
  });
  chmod(folder_.path().c_str(), 0700);
}

}  // namespace
}  // namespace lockstep::launch::testing
