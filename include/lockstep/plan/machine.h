// What a plan knows of devices and of what connects them. Needs no torch.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "lockstep/core/compiler.h"

namespace lockstep::plan {

// One device, as its vendor's data sheet has it: dense rates, without sparsity.
struct Device {
  std::string name;                // "h100-sxm"
  double memory_bytes = 0;         // of the device
  double memory_bandwidth = 0;     // bytes/s
  double narrow_flops = 0;         // bfloat16 or float16 matrix products, a second
  double float_flops = 0;          // float32 products (TF32 where the device has it)
  double local_bandwidth = 0;      // bytes/s of a collective's bus within a node
  double efficiency = 0.4;         // share of the rate that training reaches
  double reserved_bytes = 1.5e9;   // of the driver, libraries and the transport, beside tensors
  double convolution_bytes = 0;    // beside that, of a process that computes convolutions
  double attention_bytes = 0;      // beside that, of one that computes attention
  double allocator_margin = 0.06;  // share of tensors' memory that the allocator loses
  bool shares_memory = false;      // ranks of one host have one memory (CPUs)
  bool has_bf16 = true;            // multiplies bfloat16; else narrow_flops are float16's
  std::string source;              // where the figures are from
};

// What connects nodes.
struct Network {
  std::string name;           // "8x400g"
  double node_bandwidth = 0;  // bytes/s of a node, one direction
  double hop_seconds = 0;     // added to each hop between nodes, for sockets
  std::string source;
};

// One collective as it was measured: its bytes and its time.
struct MeasuredCollective {
  double bytes = 0;
  double seconds = 0;
};

// Where a job runs.
struct Machine {
  Device device;
  Network network;
  int64_t devices_per_node = 8;
  // all_reduce among the devices of a node, by bytes, ascending; in the place of `local_bandwidth`
  // where it is not empty. Written by `lockstep bench`.
  std::vector<MeasuredCollective> all_reduce;
  // As all_reduce, for its two halves; bytes are the whole tensor's; empty: half its time.
  std::vector<MeasuredCollective> all_gather, reduce_scatter;
  bool is_measured = false;  // by `lockstep bench`, with the run's own kernels
};

// The tables.
const std::vector<Device>& known_devices();
const std::vector<Network>& known_networks();

// By name, in any case. Throws ConfigError, which names the nearest ones and lists all.
const Device& device_named(const std::string& name);
const Network& network_named(const std::string& name);

// The host this runs on: its cores as devices, its memory shared by all of them. Rates are
// estimates (`is_measured` is false).
Machine this_host();

// What `lockstep bench` has written; ConfigError names the file and what is wrong in it.
Machine read_machine(const std::string& path);
// The text that read_machine() reads.
std::string machine_json(const Machine& machine);

}  // namespace lockstep::plan
