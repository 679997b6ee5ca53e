// The tables of devices and networks.
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <string>
#include <vector>

#include "core/nearest.h"
#include "core/words.h"
#include "lockstep/core/error.h"
#include "lockstep/plan/machine.h"

namespace lockstep::plan {
namespace {

constexpr double kGb = 1e9, kGib = 1024.0 * 1024 * 1024, kTera = 1e12;

// Links: what the vendor gives for both directions together. A ring of NCCL reaches 230 GB/s of
// A100's 300 in one direction and 360 of H100's 450 (NCCL's bus bandwidth), so 0.78 of it; over
// PCIe, through the host's bridges, half.
double nvlink(double both_directions) { return 0.78 * both_directions * kGb / 2; }
double pcie(double both_directions) { return 0.5 * both_directions * kGb / 2; }

Device gpu(const char* name, double gigabytes, double bandwidth, double narrow, double wide,
           double local, double efficiency, const char* source) {
  return {.name = name,
          .memory_bytes = gigabytes * kGib,
          .memory_bandwidth = bandwidth * kGb,
          .narrow_flops = narrow * kTera,
          .float_flops = wide * kTera,
          .local_bandwidth = local,
          .efficiency = efficiency,
          .source = source};
}

Device without_bf16(Device device) {
  device.has_bf16 = false;
  return device;
}

template <class Known>
const Known& named(const std::vector<Known>& all, const std::string& name, const char* what) {
  const std::string lower = lower_case(name);
  std::vector<std::string> names;
  for (const auto& each : all) {
    if (each.name == lower) return each;
    names.push_back(each.name);
  }
  throw ConfigError(fmt::format("[plan] unknown {} '{}'{}; known are {}", what, name,
                                hint_of(lower, names), fmt::join(names, ", ")));
}

}  // namespace

const std::vector<Device>& known_devices() {
  // Memory is what a process sees: GDDR6 with error correction keeps a sixteenth of it.
  // Efficiencies of A100 and H100 are those of the published runs in docs/plan.md from 3 billion
  // parameters on; the others take the nearest generation's.
  static const std::vector<Device> all = {
      without_bf16(gpu("t4", 15, 300, 65, 8.1, pcie(32), 0.35, "NVIDIA T4 data sheet")),
      without_bf16(
          gpu("v100-sxm2-16gb", 16, 900, 125, 15.7, nvlink(300), 0.4, "NVIDIA V100 data sheet")),
      without_bf16(
          gpu("v100-sxm2-32gb", 32, 900, 125, 15.7, nvlink(300), 0.4, "NVIDIA V100 data sheet")),
      gpu("a10", 22.5, 600, 125, 62.5, pcie(64), 0.45, "NVIDIA A10 data sheet"),
      gpu("a100-40gb", 40, 1555, 312, 156, nvlink(600) * 230 / 234, 0.48, "NVIDIA A100 data sheet"),
      gpu("a100-80gb", 80, 2039, 312, 156, nvlink(600) * 230 / 234, 0.48, "NVIDIA A100 data sheet"),
      gpu("rtx3090", 24, 936, 71, 35.6, pcie(64), 0.45, "NVIDIA GA102 architecture paper"),
      gpu("rtx4090", 24, 1008, 165, 82.6, pcie(64), 0.45, "NVIDIA Ada architecture paper"),
      gpu("l4", 22.5, 300, 121, 60, pcie(64), 0.4, "NVIDIA L4 data sheet"),
      gpu("l40s", 45, 864, 362, 183, pcie(64), 0.4, "NVIDIA L40S data sheet"),
      gpu("h100-pcie", 80, 2000, 756, 378, pcie(128), 0.4, "NVIDIA H100 data sheet"),
      gpu("h100-sxm", 80, 3350, 989, 494.7, nvlink(900) * 360 / 351, 0.4, "NVIDIA H100 data sheet"),
      gpu("h200", 141, 4800, 989, 494.7, nvlink(900) * 360 / 351, 0.4, "NVIDIA H200 data sheet"),
      gpu("b200", 180, 8000, 2250, 1125, nvlink(1800), 0.4, "NVIDIA DGX B200 data sheet"),
      gpu("mi250x", 64, 1638, 191.5, 47.9, pcie(200), 0.35,
          "AMD MI250X data sheet, for one of its two dies: each is a device"),
      gpu("mi300x", 192, 5300, 1307, 653.7, nvlink(896), 0.35, "AMD MI300X data sheet"),
  };
  return all;
}

const std::vector<Network>& known_networks() {
  // Of InfiniBand and RoCE a collective reaches 0.85 of the rate; sockets over Ethernet 0.9 of it,
  // with about 30 us more to each hop.
  const auto fabric = [](const char* name, double gbit, const char* source) {
    return Network{name, 0.85 * gbit / 8 * kGb, 0, source};
  };
  const auto ethernet = [](const char* name, double gbit) {
    return Network{name, 0.9 * gbit / 8 * kGb, 30e-6, "IEEE 802.3 rates"};
  };
  static const std::vector<Network> all = {
      fabric("8x400g", 3200, "NVIDIA DGX H100: eight ConnectX-7 of 400 Gbit/s"),
      fabric("8x200g", 1600, "NVIDIA DGX A100: eight ConnectX-6 of 200 Gbit/s"),
      fabric("efa-3200g", 3200, "AWS p5: EFA of 3200 Gbit/s"),
      fabric("efa-400g", 400, "AWS p4d: EFA of 400 Gbit/s"),
      fabric("1x400g", 400, "one ConnectX-7 of 400 Gbit/s"),
      fabric("1x200g", 200, "one ConnectX-6 of 200 Gbit/s"),
      fabric("1x100g", 100, "one port of 100 Gbit/s with RDMA"),
      ethernet("ethernet-100g", 100),
      ethernet("ethernet-25g", 25),
      ethernet("ethernet-10g", 10),
      ethernet("ethernet-1g", 1),
  };
  return all;
}

const Device& device_named(const std::string& name) {
  return named(known_devices(), name, "device");
}

const Network& network_named(const std::string& name) {
  return named(known_networks(), name, "network");
}

}  // namespace lockstep::plan
