// The memory allocators that ranks are started with.
#include "launch/process/allocator.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>

#include "launch/job.h"
#include "launch/job/run.h"
#include "launch/process/environment.h"
#include "launch/rendezvous/host.h"
#include "support/folder.h"
#include "support/thrown.h"

namespace lockstep::launch::testing {
namespace {

namespace fs = std::filesystem;
using test::message_of;
using ::testing::AllOf;
using ::testing::HasSubstr;

TEST(Allocator, TheFirstFolderWithTheUsualLibraryHasIt) {
  const test::Folder folders;
  const fs::path top = folders.path();
  for (const char* folder : {"a", "b"}) fs::create_directories(top / folder);
  std::ofstream(top / "a" / "libtcmalloc.so.4");
  std::ofstream(top / "b" / "libtcmalloc_minimal.so.4");
  const std::vector<fs::path> both = {top / "a", top / "b"};
  EXPECT_EQ(find_allocator("tcmalloc", both), top / "b" / "libtcmalloc_minimal.so.4");
  EXPECT_EQ(find_allocator("tcmalloc", {top / "a"}), top / "a" / "libtcmalloc.so.4");
  EXPECT_THAT(message_of([&] { find_allocator("jemalloc", both); }),
              AllOf(HasSubstr("no libjemalloc.so.2 or libjemalloc.so.1 in " + (top / "a").string()),
                    HasSubstr("Debian: libjemalloc2")));
  EXPECT_THAT(message_of([&] { find_allocator("malloc", both); }),
              HasSubstr("malloc is none of system, tcmalloc, jemalloc"));
}

TEST(Allocator, RanksTakeTheirMemoryFromIt) {
  const std::string script = "echo $LD_PRELOAD; grep -c tcmalloc /proc/self/maps";
  const std::string library = find_allocator("tcmalloc");
  const std::vector<std::string> command = {"run", "--memory-allocator=tcmalloc", "sh", "-c",
                                            script};
  const auto lines = lines_of(Job(command).wait().out);
  ASSERT_EQ(lines.size(), 2u);
  EXPECT_EQ(lines[0], library);
  EXPECT_GT(std::stoi(lines[1]), 0);
}

TEST(Allocator, StandsBeforeWhatIsPreloadedAnyway) {
  const Options options{.preload = "/opt/lib/a.so"};
  EXPECT_EQ(rank_variables(options, {}, 0).at("LD_PRELOAD"), "/opt/lib/a.so");
  setenv("LD_PRELOAD", "libm.so.6", 1);
  const auto variables = rank_variables(options, {}, 0);
  unsetenv("LD_PRELOAD");
  EXPECT_EQ(variables.at("LD_PRELOAD"), "/opt/lib/a.so:libm.so.6");
}

TEST(Allocator, TheSystemsIsTheDefault) {
  for (const std::vector<std::string>& flags :
       {std::vector<std::string>{"run"}, {"run", "--memory-allocator", "system"}}) {
    std::vector<std::string> command = flags;
    command.insert(command.end(), {"sh", "-c", "echo x$LD_PRELOAD"});
    EXPECT_EQ(Job(command).wait().out, "x\n");
  }
}

// The dynamic linker would start the ranks without it.
TEST(Allocator, APathThatCannotBePreloadedIsRefused) {
  const test::Folder folder;
  const fs::path top = folder.path();
  const std::string real = find_allocator("tcmalloc");
  EXPECT_EQ(find_allocator(real), real);
  for (const char* name : {"with space.so", "with:colon.so"}) {
    fs::create_symlink(real, top / name);
    EXPECT_THAT(message_of([&] { find_allocator((top / name).string()); }),
                HasSubstr("LD_PRELOAD can name no path with a space or a colon"));
  }
  fs::create_directories(top / "a folder");
  fs::create_symlink(real, top / "a folder" / "libtcmalloc.so.4");
  EXPECT_THAT(message_of([&] { find_allocator("tcmalloc", {top / "a folder"}); }),
              HasSubstr("LD_PRELOAD can name no path with a space"));
  fs::create_symlink(real, top / "good.so");
  EXPECT_EQ(find_allocator((top / "good.so").string()), (top / "good.so").string());
  for (const char* text : {"",
                           "\x7f"
                           "ELF",
                           "/* GNU ld script */ INPUT(libtcmalloc.so.4)"}) {
    std::ofstream(top / "text.so") << text;
    EXPECT_THAT(message_of([&] { find_allocator((top / "text.so").string()); }),
                HasSubstr("text.so: it is no shared library"));
  }
}

TEST(Allocator, WhatIsNotThereIsAUsageError) {
  const Result refused = Job({"run", "--memory-allocator=/nowhere/lib.so", "true"}).wait();
  EXPECT_EQ(refused.exit_code, 2);
  EXPECT_THAT(refused.err, HasSubstr("--memory-allocator /nowhere/lib.so: there is no such file"));
}

}  // namespace
}  // namespace lockstep::launch::testing
