// What `lockstep bench` writes and `lockstep plan --machine` reads.
#include "lockstep/plan/machine.h"

#include <gmock/gmock.h>

#include <fstream>
#include <nlohmann/json.hpp>

#include "lockstep/core/error.h"
#include "lockstep/plan/cost_model.h"
#include "support/folder.h"
#include "support/tool.h"

namespace lockstep::plan {
namespace {

using test::lockstep_tool;
using testing::HasSubstr;

TEST(MachineFile, IsReadBack) {
  const test::Folder folder;
  Machine machine = this_host();
  machine.devices_per_node = 2;
  machine.all_reduce = {{1024, 1e-5}, {1 << 20, 1e-4}};
  machine.all_gather = {{1024, 7e-6}};
  machine.device.convolution_bytes = 14e6;
  machine.device.has_bf16 = !machine.device.has_bf16;
  const auto path = folder / "machine.json";
  std::ofstream(path) << machine_json(machine);
  const auto read = read_machine(path);
  EXPECT_TRUE(read.is_measured);
  EXPECT_EQ(read.devices_per_node, 2);
  EXPECT_DOUBLE_EQ(read.device.convolution_bytes, 14e6);
  EXPECT_EQ(read.device.has_bf16, machine.device.has_bf16);
  EXPECT_EQ(read.all_reduce.size(), 2);
  const Ranks two = {.count = 2, .per_node = 2};
  EXPECT_DOUBLE_EQ(all_gather_seconds(read, two, 1024), 7e-6);
  EXPECT_DOUBLE_EQ(reduce_scatter_seconds(read, two, 1024), 5e-6);  // half of the all_reduce
  auto json = nlohmann::json::parse(machine_json(machine));
  json.erase("convolution_bytes");  // as files of earlier versions
  json.erase("has_bf16");
  std::ofstream(path) << json.dump();
  EXPECT_DOUBLE_EQ(read_machine(path).device.convolution_bytes,
                   this_host().device.convolution_bytes);
  EXPECT_EQ(read_machine(path).device.has_bf16, this_host().device.has_bf16);
  json["convolution_bytes"] = -1;
  std::ofstream(path) << json.dump();
  EXPECT_THROW(read_machine(path), ConfigError);
  std::ofstream(path) << R"({"format": "lockstep.machine", "memory_bytes": -1})";
  EXPECT_THROW(read_machine(path), ConfigError);
}

TEST(MachineFile, WithoutWholeRanksIsRefused) {
  const test::Folder folder;
  const auto path = folder / "machine.json";
  auto json = nlohmann::json::parse(machine_json(this_host()));
  const auto said = [&] {
    std::ofstream(path) << json.dump();
    const auto out = lockstep_tool("plan --model qwen3-0.6b --machine " + path);
    EXPECT_EQ(out.status, 2) << out.said;
    return out.said;
  };
  for (const nlohmann::json& ranks :
       {nlohmann::json(0.3), nlohmann::json(1.5), nlohmann::json(0), nlohmann::json(-1),
        nlohmann::json(1e300), nlohmann::json("2")}) {
    json["ranks"] = ranks;
    EXPECT_THAT(said(), HasSubstr("ranks is not a whole number")) << ranks;
  }
  json["ranks"] = 2.0;
  json["shares_memory"] = "yes";
  EXPECT_THAT(said(), HasSubstr("shares_memory is neither true nor false"));
}

}  // namespace
}  // namespace lockstep::plan
