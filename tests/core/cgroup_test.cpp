// Limits of control groups, in directories as the kernel shows them.
#include "core/process/cgroup.h"

#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <map>
#include <string>

#include "support/folder.h"

namespace lockstep {
namespace {

namespace fs = std::filesystem;

class Cgroup : public testing::Test {
 protected:
  void write(const std::map<std::string, std::string>& files) const {
    for (const auto& [name, text] : files) {
      fs::create_directories((root_ / name).parent_path());
      std::ofstream(root_ / name) << text << "\n";
    }
  }
  const test::Folder folder_;
  const fs::path root_ = folder_.path();
};

TEST_F(Cgroup, WithoutALimitThereIsNone) {
  EXPECT_EQ(group_memory_left(root_), std::nullopt);
  EXPECT_EQ(group_cores(root_), std::nullopt);
  write({{"proc/self/cgroup", "0::/"},
         {"sys/fs/cgroup/memory.max", "max"},
         {"sys/fs/cgroup/memory.current", "5"},
         {"sys/fs/cgroup/cpu.max", "max 100000"}});
  EXPECT_EQ(group_memory_left(root_), std::nullopt);
  EXPECT_EQ(group_cores(root_), std::nullopt);
}

TEST_F(Cgroup, FilesInTheCacheAreNoUse) {
  write({{"proc/self/cgroup", "0::/"},
         {"sys/fs/cgroup/memory.max", "1000"},
         {"sys/fs/cgroup/memory.current", "900"},
         {"sys/fs/cgroup/memory.stat", "anon 100\nfile 800\ninactive_file 500\nactive_file 200"}});
  EXPECT_EQ(group_memory_left(root_), 800);
}

TEST_F(Cgroup, TheTightestOfNestedGroupsCounts) {
  write({{"proc/self/cgroup", "0::/job/step"},
         {"sys/fs/cgroup/job/step/memory.max", "max"},
         {"sys/fs/cgroup/job/step/memory.current", "10"},
         {"sys/fs/cgroup/job/memory.max", "1000"},
         {"sys/fs/cgroup/job/memory.current", "600"},
         {"sys/fs/cgroup/job/cpu.max", "150000 100000"},
         {"sys/fs/cgroup/cpu.max", "400000 100000"}});
  EXPECT_EQ(group_memory_left(root_), 400);
  EXPECT_EQ(group_cores(root_), 1.5);
  EXPECT_EQ(whole_group_cores(root_), 2);
}

TEST_F(Cgroup, VersionOne) {
  write({{"proc/self/cgroup", "5:memory:/docker/a\n4:cpu,cpuacct:/docker/a\n0::/docker/a"},
         {"sys/fs/cgroup/memory/docker/a/memory.limit_in_bytes", "2000"},
         {"sys/fs/cgroup/memory/docker/a/memory.usage_in_bytes", "1500"},
         {"sys/fs/cgroup/memory/docker/a/memory.stat", "total_inactive_file 300"},
         {"sys/fs/cgroup/memory/memory.limit_in_bytes", "9223372036854771712"},
         {"sys/fs/cgroup/memory/memory.usage_in_bytes", "7000"},
         {"sys/fs/cgroup/cpu,cpuacct/docker/a/cpu.cfs_quota_us", "200000"},
         {"sys/fs/cgroup/cpu,cpuacct/docker/a/cpu.cfs_period_us", "100000"},
         {"sys/fs/cgroup/cpu,cpuacct/cpu.cfs_quota_us", "-1"},
         {"sys/fs/cgroup/cpu,cpuacct/cpu.cfs_period_us", "100000"}});
  EXPECT_EQ(group_memory_left(root_), 800);
  EXPECT_EQ(group_cores(root_), 2.0);
}

// A container sees its own group at the root of what is mounted.
TEST_F(Cgroup, APathThatOnlyTheHostSees) {
  write({{"proc/self/cgroup", "0::/docker/a"},
         {"sys/fs/cgroup/memory.max", "1000"},
         {"sys/fs/cgroup/memory.current", "100"}});
  EXPECT_EQ(group_memory_left(root_), 900);
}

}  // namespace
}  // namespace lockstep
