#include "comm/cuda_ipc/kernels.h"

#include <fmt/format.h>

#include <iterator>

#include "comm/device/capture.h"
#include "lockstep/core/error.h"

namespace lockstep::comm::cuda_ipc {
namespace {

const char* type_of(Element element) {
  switch (element) {
    case Element::Float32:
      return "float";
    case Element::Float64:
      return "double";
    case Element::Float16:
      return "Half";
    case Element::BFloat16:
      return "Brain";
    case Element::Int8:
      return "signed char";
    case Element::Int16:
      return "short";
    case Element::Int32:
      return "int";
    case Element::Int64:
      return "long long";
    case Element::UInt8:
    case Element::Bool:  // 0 or 1, and its operations are Or and And
      return "unsigned char";
    case Element::UInt16:
      return "unsigned short";
    case Element::UInt32:
      return "unsigned int";
    case Element::UInt64:
      return "unsigned long long";
    case Element::Float8E4M3:
      return "E4M3";
    case Element::Float8E5M2:
      return "E5M2";
    case Element::Complex64:
      return "Complex<float>";
    case Element::Complex128:
      return "Complex<double>";
  }
  return "";
}

// Destroys it, whatever happens.
struct OwnProgram {
  explicit OwnProgram(const Compiler& the_nvrtc) : nvrtc(the_nvrtc) {}
  ~OwnProgram() {
    if (program != nullptr) nvrtc.DestroyProgram(&program);
  }
  OwnProgram(const OwnProgram&) = delete;
  OwnProgram& operator=(const OwnProgram&) = delete;

  void check(int result, const char* call) const {
    if (result == 0) return;
    size_t length = 0;
    std::string log;
    if (program != nullptr && nvrtc.GetProgramLogSize(program, &length) == 0 && length > 1) {
      log.resize(length);
      nvrtc.GetProgramLog(program, log.data());
      log.resize(length - 1);
    }
    throw ConfigError(
        fmt::format("[cuda_ipc] {} does not compile the kernels ({}: {}){}{}: let LOCKSTEP_NVRTC "
                    "name a libnvrtc.so that knows this device, or use LOCKSTEP_BACKEND=nccl",
                    nvrtc.path, call, nvrtc.GetErrorString(result), log.empty() ? "" : "\n", log));
  }

  const Compiler& nvrtc;
  Program program = nullptr;
};

}  // namespace

std::vector<std::string> defines_of(const Reduction& reduction, int ranks) {
  return {fmt::format("-DLOCKSTEP_ELEMENT={}", type_of(reduction.element)),
          fmt::format("-DLOCKSTEP_COMBINE={}", static_cast<int>(reduction.combine)),
          fmt::format("-DLOCKSTEP_RANKS={}", ranks)};
}

std::string compile(int version, const std::vector<std::string>& defines) {
  const Compiler& nvrtc = compiler();
  OwnProgram own(nvrtc);
  own.check(nvrtc.CreateProgram(&own.program, kKernels, "kernels.cu", std::size(kHeaders), kHeaders,
                                kHeaderNames),
            "nvrtcCreateProgram");
  // Nothing is fused or flushed to zero: the bits are those of other transports.
  const std::string architecture = fmt::format("--gpu-architecture=sm_{}", version);
  std::vector<const char*> options{architecture.c_str(), "--std=c++17",
                                   "--fmad=false",       "--ftz=false",
                                   "--prec-div=true",    "--device-as-default-execution-space"};
  for (const std::string& define : defines) options.push_back(define.c_str());
  own.check(nvrtc.CompileProgram(own.program, static_cast<int>(options.size()), options.data()),
            "nvrtcCompileProgram");
  size_t bytes = 0;
  own.check(nvrtc.GetCUBINSize(own.program, &bytes), "nvrtcGetCUBINSize");
  std::string binary(bytes, '\0');
  own.check(nvrtc.GetCUBIN(own.program, binary.data()), "nvrtcGetCUBIN");
  return binary;
}

Kernels::~Kernels() {
  for (const auto& [defines, module] : modules_) driver().ModuleUnload(module);
}

Function Kernels::function_of(std::vector<std::string> defines, const char* name) {
  std::vector<std::string> key = defines;
  key.emplace_back(name);
  if (const auto known = functions_.find(key); known != functions_.end()) return known->second;
  auto found = modules_.find(defines);
  if (found == modules_.end()) {
    const BesideCaptures beside;
    const std::string binary = compile(version_, defines);
    Module module = nullptr;
    check(driver().ModuleLoadData(&module, binary.data()), "cuModuleLoadData");
    found = modules_.emplace(std::move(defines), module).first;
  }
  Function function = nullptr;
  check(driver().ModuleGetFunction(&function, found->second, name), "cuModuleGetFunction");
  functions_.emplace(std::move(key), function);
  return function;
}

}  // namespace lockstep::comm::cuda_ipc
