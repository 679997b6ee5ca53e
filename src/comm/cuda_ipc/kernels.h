// The kernels of this process's device, compiled when they are first needed.
#pragma once

#include <map>
#include <string>
#include <vector>

#include "comm/cuda_ipc/api.h"
#include "comm/reduce/reduce.h"

namespace lockstep::comm::cuda_ipc {

// The texts of kernels.cu and of what it includes.
extern const char* const kKernels;
extern const char* const kHeaders[3];
extern const char* const kHeaderNames[3];

// Makes the device's primary context current, which libtorch computes in.
class Current {
 public:
  explicit Current(Context context) { check(driver().CtxPushCurrent(context), "cuCtxPushCurrent"); }
  ~Current() {
    Context gone = nullptr;
    driver().CtxPopCurrent(&gone);
  }
  Current(const Current&) = delete;
  Current& operator=(const Current&) = delete;
};

// What NVRTC makes of the kernels for devices of `version` (80 is 8.0), with `defines`. Throws
// ConfigError that quotes the compiler.
std::string compile(int version, const std::vector<std::string>& defines);
// The defines of lockstep_combine.
std::vector<std::string> defines_of(const Reduction& reduction, int ranks);

// One thread at a time, with the context current.
class Kernels {
 public:
  explicit Kernels(int version) : version_(version) {}
  ~Kernels();
  Kernels(const Kernels&) = delete;
  Kernels& operator=(const Kernels&) = delete;

  Function copy() { return function_of({}, "lockstep_copy"); }
  Function message() { return function_of({}, "lockstep_message"); }
  Function combine(const Reduction& reduction, int ranks) {
    return function_of(defines_of(reduction, ranks), "lockstep_combine");
  }

 private:
  Function function_of(std::vector<std::string> defines, const char* name);

  const int version_;
  std::map<std::vector<std::string>, Module> modules_;      // by defines
  std::map<std::vector<std::string>, Function> functions_;  // by defines and name
};

}  // namespace lockstep::comm::cuda_ipc
