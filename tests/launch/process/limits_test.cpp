// Limits, old kernels and sandboxes: a job works there, or says at the start what is missing.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/syscall.h>

#include <cerrno>
#include <csignal>
#include <cstdlib>
#include <string>

#include "launch/job.h"
#include "support/folder.h"

namespace lockstep::launch::testing {
namespace {

using ::testing::HasSubstr;
using ::testing::Not;

TEST(OldKernel, WithoutSomeSystemCallsRunsAJobAllTheSame) {
  for (const int refusal : {ENOSYS, EPERM, EINVAL}) {
    // Nothing but the standard streams is open in a rank all the same, and the directory that ls
    // reads, and what the launcher hands over.
    const Result result = run_script(
        2, "test -e /proc/self/fd/57 && exit 4; exit $((3 * RANK))",
        {.extra_fd = 57, .refused_calls = {SYS_close_range, SYS_pidfd_open}, .refusal = refusal});
    EXPECT_EQ(result.exit_code, 3) << result.err;
  }
}

// As a signal finds a rank that has not made its session yet.
TEST(Sandbox, InWhichARankHasNoGroupPassesSignalsOn) {
  Job job(script_args(2, "trap 'echo told; exit 0' USR1; echo ready; while :; do sleep 0.01; done"),
          {.refused_calls = {SYS_setsid}, .refusal = EPERM});
  ASSERT_TRUE(job.await("ready", 2));
  kill(job.pid(), SIGUSR1);
  ASSERT_TRUE(job.await("told", 2));
  EXPECT_EQ(job.wait().exit_code, 0);
}

TEST(OldKernel, WithoutSharedMemoryIsOneClearError) {
  const Result result = run_script(2, "true", {.refused_calls = {SYS_memfd_create}});
  EXPECT_EQ(result.exit_code, 1);
  EXPECT_THAT(result.err, HasSubstr("memfd_create: Function not implemented"));
  EXPECT_EQ(lines_of(result.err).size(), 1U) << result.err;
}

TEST(SharedMemory, ThatLacksIsNamedByDoctorWithTheReason) {
  const Result result =
      Job({"doctor"}, {.refused_calls = {SYS_fallocate}, .refusal = ENOMEM}).wait();
  EXPECT_EQ(result.exit_code, 1);
  EXPECT_THAT(result.out, HasSubstr("no 64 MiB of shared memory: Cannot allocate memory"));
}

TEST(OpenFiles, ThatLackForSharedMemoryAreNamedWithTheLimit) {
  const Result result =
      run_script(2, "true", {.refused_calls = {SYS_memfd_create}, .refusal = EMFILE});
  EXPECT_EQ(result.exit_code, 1);
  EXPECT_THAT(result.err, HasSubstr("no descriptor is left: raise `ulimit -n`"));
}

TEST(AddressSpace, ThatIsTooSmallForALibraryIsNotCalledAMissingOne) {
  for (const auto& [said, hint] :
       {std::pair("libx.so: failed to map segment from shared object", "`ulimit -v`"),
        std::pair("cannot create shared object descriptor: Cannot allocate memory", "`ulimit -v`"),
        std::pair("libx.so: cannot open shared object file", "was not found")}) {
    const Result result = run_script(2, "echo " + std::string(said) + " >&2; exit 127");
    EXPECT_EQ(result.exit_code, 127);
    EXPECT_THAT(result.err, ::testing::ContainsRegex("hint: .*" + std::string(hint)));
  }
}

TEST(ProcessorTime, ThatIsUsedUpIsNamedAsTheCause) {
  const test::Folder folder(test::Folder::On::Disk);
  const auto said = [&](const std::string& limit) {
    const std::string script = "ulimit " + limit +
                               "; exec " LOCKSTEP_BINARY_DIR
                               "/bin/lockstep run sh -c 'while :; do :; done' 2> " +
                               (folder / "said");
    EXPECT_NE(std::system(script.c_str()), 0);
    return test::contents(folder / "said");
  };
  EXPECT_THAT(said("-t 2"), HasSubstr("processor time that ulimit -t allows"));
  EXPECT_THAT(said("-St 2"), HasSubstr("processor time that ulimit -t allows"));  // SIGXCPU
}

// As libraries fail then, with words about something else.
TEST(Surroundings, ThatARankDiesOfAreNamed) {
  const test::Folder folder(test::Folder::On::Disk);
  const auto said = [&](const std::string& before, const std::string& end) {
    const std::string script =
        "mkdir " + (folder / "gone") + " && cd " + (folder / "gone") + " && " + before +
        " && " LOCKSTEP_BINARY_DIR "/bin/lockstep run sh -c '" + end + "' 2> " + (folder / "said");
    EXPECT_NE(std::system(script.c_str()), 0);
    EXPECT_EQ(std::system(("rm -rf " + (folder / "gone")).c_str()), 0);
    return test::contents(folder / "said");
  };
  const std::string segv = "kill -SEGV $$";
  [[maybe_unused]] const std::string abort = "kill -ABRT $$";
  EXPECT_THAT(said("rmdir ../gone", "exit 2"), HasSubstr("the working directory has been removed"));
  EXPECT_THAT(said("ulimit -Ss 512", segv), HasSubstr("its stack has 512 KiB (`ulimit -s`)"));
#if !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)  // which want more of it
  EXPECT_THAT(said("ulimit -Sv 2097152", abort), HasSubstr("limited to 2048 MiB (`ulimit -v`)"));
#endif
  EXPECT_THAT(said("true", "exit 2"), Not(HasSubstr("hint")));
  EXPECT_THAT(said("true", segv), Not(HasSubstr("ulimit")));
}

TEST(OpenFiles, AreRaisedForTheLauncherAndNotForItsRanks) {
  // Two pipes for each of 40 ranks.
  const Result result =
      run_script(40, "ulimit -Sn", {.most_open_files = 64, .most_open_files_ever = 1024});
  EXPECT_EQ(result.exit_code, 0) << result.err;
  EXPECT_THAT(result.out, HasSubstr("[rank 39] 64\n"));
}

TEST(OpenFiles, TooFewAreOneClearError) {
  const Result result = run_script(40, "true", {.most_open_files = 64, .most_open_files_ever = 64});
  EXPECT_EQ(result.exit_code, 1);
  EXPECT_THAT(result.err, HasSubstr("raise the limit (ulimit -n)"));
  EXPECT_EQ(run_script(8, "true", {.most_open_files = 64, .most_open_files_ever = 64}).exit_code,
            0);
}

TEST(OpenFiles, TooFewForACoordinatorAreOneClearError) {
  const auto coordinate = [](const std::string& nodes) {
    return Job({"run", "--nnodes=" + nodes, "--rdzv-endpoint=127.0.0.1:0",
                "--rdzv-conf=is_host=1,last_call_timeout=0", "true"},
               {.environment = {{"LOCKSTEP_TOKEN", "0123456789abcdef"}},
                .most_open_files = 64,
                .most_open_files_ever = 64})
        .wait();
  };
  const Result result = coordinate("1:100");
  EXPECT_EQ(result.exit_code, 2);
  EXPECT_THAT(result.err, HasSubstr("--nnodes 100: the coordinator keeps a connection with each"));
  EXPECT_EQ(coordinate("1:8").exit_code, 0);
}

// Not under ThreadSanitizer, whose runtime writes a file of its own first.
TEST(FileSize, ThatIsTooSmallForSharedMemoryIsOneClearError) {
  const Result result = run_script(2, "true", {.most_file_bytes = 0});
  EXPECT_EQ(result.exit_code, 1);
  EXPECT_THAT(result.err, HasSubstr("ftruncate: File too large; raise `ulimit -f`"));
}

TEST(FileSize, ThatIsLimitedCostsTheFileAndNotTheJob) {
  const test::Folder folder{test::Folder::On::Disk};
  const Result result = Job({"run", "--nproc-per-node=2", "--tee=1", "--log-dir", folder.path(),
                             "sh", "-c", "seq 30000"},
                            {.most_file_bytes = 1 << 16})
                            .wait();
  EXPECT_EQ(result.exit_code, 0) << result.err;
  EXPECT_EQ(lines_of(result.out).size(), 60'000U);
  EXPECT_THAT(result.err, HasSubstr("/0/stdout.log: File too large; the job continues without"));
  EXPECT_THAT(result.err, HasSubstr(" bytes of output could not be written to log files\n"));
}

}  // namespace
}  // namespace lockstep::launch::testing
