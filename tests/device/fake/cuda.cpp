// A library with the symbols of NVIDIA's driver and of NVRTC that cuda_ipc calls, for the fake
// device: its memory is files that processes share, its kernels run on threads of the host.
//   FAKE_CUDA_THREADS=4    threads of each block; then all blocks run at the same time
//   FAKE_CUDA_VERSION=61   what the device can compute
//   FAKE_CUDA_OLD=1        the driver does not know of MPS
//   FAKE_CUDA_MOST=1000    bytes that can be allocated at once
//   FAKE_CUDA_SLOW_MS=100  how late a thread of a kernel that combines is
//   FAKE_CUDA_MPS=1        processes compute on one device at the same time
//   FAKE_NVRTC_FAILS=1     nothing compiles
#include <fcntl.h>
#include <sched.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <memory>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

#include "comm/cuda_ipc/api.h"
#include "device/fake/kernels.h"
#include "device/fake/stream.h"

namespace ipc = lockstep::comm::cuda_ipc;
namespace fake = lockstep::test::fake;

namespace {

constexpr int kNotSupported = 801, kOutOfMemory = 2, kInvalid = 1;

int number_of(const char* variable, int otherwise) {
  const char* said = std::getenv(variable);
  return said != nullptr ? std::atoi(said) : otherwise;
}

struct Compiled {
  std::string source;
  std::vector<std::string> options;
  std::string binary;
};

// "-DNAME=value": value.
std::string option_of(const std::string& line, const std::string& name) {
  const std::string start = "-D" + name + "=";
  return line.starts_with(start) ? line.substr(start.size()) : "";
}

struct Kernel {
  std::string name;
  fake::CombineKernel combine;
};

struct Launch {
  Kernel kernel;
  fake::Grid grid;
  ipc::Round round;
  ipc::Messages messages;

  static void run(const void* argument) {
    const auto& launch = *static_cast<const Launch*>(argument);
    if (launch.kernel.name == "lockstep_message") return fake::message_kernel(launch.messages);
    if (launch.kernel.name == "lockstep_copy") return fake::copy_kernel(launch.round);
    launch.kernel.combine(launch.round);
  }
};

void enqueue(ipc::Stream stream, std::function<void()> work) {
  auto* handle = static_cast<FakeStreamHandle*>(stream);
  using Work = std::function<void()>;
  handle->enqueue_communication(
      handle, [](void* argument) { (*static_cast<Work*>(argument))(); }, new Work(std::move(work)),
      [](void* argument) { delete static_cast<Work*>(argument); });
}

}  // namespace

namespace {
unsigned most_blocks = 0;
}

extern "C" {

// Of any kernel that combines or copies; then it is counted anew.
unsigned fakeCudaMostBlocks() { return std::exchange(most_blocks, 0); }
// A kernel that moves messages, now.
void fakeCudaRunMessages(const ipc::Messages* messages) {
  const auto blocks = static_cast<unsigned>(messages->peers.size * 2 * ipc::kLanes);
  fake::run_grid(
      {blocks, 1, true},
      [](const void* all) { fake::message_kernel(*static_cast<const ipc::Messages*>(all)); },
      messages);
}

int cuInit(unsigned) { return 0; }
int cuGetErrorString(int error, const char** text) {
  *text = error == kNotSupported ? "operation not supported" : "said by the fake driver";
  return 0;
}
int cuDeviceGet(ipc::Device* device, int index) {
  *device = index;
  return 0;
}
int cuDeviceGetAttribute(int* value, int which, ipc::Device) {
  if (which == ipc::HasMps && std::getenv("FAKE_CUDA_OLD") != nullptr) return kInvalid;
  const int version = number_of("FAKE_CUDA_VERSION", 90);
  *value = 1;
  if (which == ipc::Multiprocessors) *value = 16;
  if (which == ipc::MajorVersion) *value = version / 10;
  if (which == ipc::MinorVersion) *value = version % 10;
  if (which == ipc::HasMps) *value = number_of("FAKE_CUDA_MPS", 0);
  return 0;
}
int cuDevicePrimaryCtxRetain(ipc::Context* context, ipc::Device) {
  static int only = 0;
  *context = &only;
  return 0;
}
int cuDevicePrimaryCtxRelease_v2(ipc::Device) { return 0; }
int cuCtxPushCurrent_v2(ipc::Context) { return 0; }
int cuCtxPopCurrent_v2(ipc::Context*) { return 0; }

int cuMemGetAllocationGranularity(size_t* unit, const ipc::Properties*, int) {
  *unit = size_t{64} << 10;
  return 0;
}
int cuMemCreate(ipc::Memory* memory, size_t bytes, const ipc::Properties* properties,
                unsigned long long) {
  if (properties->handles != ipc::kDescriptor || properties->location.type != ipc::kOnDevice)
    return kInvalid;
  if (bytes > static_cast<size_t>(number_of("FAKE_CUDA_MOST", 1 << 30))) return kOutOfMemory;
  const int fd = memfd_create("fake-cuda", MFD_CLOEXEC);
  if (fd < 0 || ftruncate(fd, static_cast<off_t>(bytes)) != 0) return kOutOfMemory;
  *memory = static_cast<ipc::Memory>(fd);
  return 0;
}
int cuMemRelease(ipc::Memory memory) { return close(static_cast<int>(memory)); }
int cuMemExportToShareableHandle(void* handle, ipc::Memory memory, int, unsigned long long) {
  *static_cast<int*>(handle) = fcntl(static_cast<int>(memory), F_DUPFD_CLOEXEC, 0);
  return 0;
}
int cuMemImportFromShareableHandle(ipc::Memory* memory, void* handle, int) {
  const int fd = fcntl(static_cast<int>(reinterpret_cast<intptr_t>(handle)), F_DUPFD_CLOEXEC, 0);
  *memory = static_cast<ipc::Memory>(fd);
  return fd < 0 ? kInvalid : 0;
}
int cuMemAddressReserve(ipc::Address* address, size_t bytes, size_t, ipc::Address,
                        unsigned long long) {
  void* place = mmap(nullptr, bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  *address = reinterpret_cast<ipc::Address>(place);
  return place == MAP_FAILED ? kOutOfMemory : 0;
}
int cuMemAddressFree(ipc::Address address, size_t bytes) {
  return munmap(reinterpret_cast<void*>(address), bytes);
}
// Nothing can be read before access is set.
int cuMemMap(ipc::Address address, size_t bytes, size_t, ipc::Memory memory, unsigned long long) {
  void* place = mmap(reinterpret_cast<void*>(address), bytes, PROT_NONE, MAP_SHARED | MAP_FIXED,
                     static_cast<int>(memory), 0);
  return place == MAP_FAILED ? kInvalid : 0;
}
int cuMemUnmap(ipc::Address address, size_t bytes) {
  return mmap(reinterpret_cast<void*>(address), bytes, PROT_NONE,
              MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0) == MAP_FAILED
             ? kInvalid
             : 0;
}
int cuMemSetAccess(ipc::Address address, size_t bytes, const ipc::Access* access, size_t) {
  if (std::getenv("FAKE_CUDA_NO_PEERS") != nullptr) return kNotSupported;
  if (access->flags != ipc::kReadAndWrite) return kInvalid;
  return mprotect(reinterpret_cast<void*>(address), bytes, PROT_READ | PROT_WRITE);
}
int cuMemsetD8_v2(ipc::Address address, unsigned char value, size_t bytes) {
  std::memset(reinterpret_cast<void*>(address), value, bytes);
  return 0;
}
int cuMemHostAlloc(void** memory, size_t bytes, unsigned) {
  *memory = std::calloc(1, bytes);
  return 0;
}
int cuMemHostGetDevicePointer_v2(ipc::Address* address, void* memory, unsigned) {
  *address = reinterpret_cast<ipc::Address>(memory);
  return 0;
}
int cuMemFreeHost(void* memory) {
  std::free(memory);
  return 0;
}

int cuDeviceGetUuid_v2(ipc::Uuid* uuid, ipc::Device device) {
  *uuid = {};
  uuid->bytes[0] = static_cast<unsigned char>(device + 1);
  return 0;
}
int cuMemHostRegister_v2(void*, size_t, unsigned) { return 0; }
int cuMemHostUnregister(void*) { return 0; }
int cuStreamWaitValue64_v2(ipc::Stream stream, ipc::Address address, unsigned long long value,
                           unsigned condition) {
  if (condition != ipc::kAtLeast) return kInvalid;
  enqueue(stream, [word = reinterpret_cast<const ipc::U64*>(address), value] {
    while (static_cast<long long>(__atomic_load_n(word, __ATOMIC_ACQUIRE) - value) < 0)
      sched_yield();
  });
  return 0;
}

int cuModuleLoadData(ipc::Module* module, const void* binary) {
  *module = new std::string(static_cast<const char*>(binary));
  return 0;
}
int cuModuleUnload(ipc::Module module) {
  delete static_cast<std::string*>(module);
  return 0;
}
// A function lives as long as the process.
int cuModuleGetFunction(ipc::Function* function, ipc::Module module, const char* name) {
  std::istringstream lines(*static_cast<std::string*>(module));
  fake::Variant variant;
  for (std::string line; std::getline(lines, line);) {
    if (const auto value = option_of(line, "LOCKSTEP_ELEMENT"); !value.empty())
      variant.element = value;
    if (const auto value = option_of(line, "LOCKSTEP_COMBINE"); !value.empty())
      variant.combine = value;
    if (const auto value = option_of(line, "LOCKSTEP_RANKS"); !value.empty()) variant.ranks = value;
  }
  const std::string wanted = name;
  const bool combines = !variant.element.empty();
  if (combines != (wanted == "lockstep_combine")) return kInvalid;
  const fake::CombineKernel kernel = fake::combine_kernel(variant);
  if (combines && kernel == nullptr) return kNotSupported;
  static std::vector<std::unique_ptr<Kernel>> all;
  all.push_back(std::make_unique<Kernel>(wanted, kernel));
  *function = all.back().get();
  return 0;
}
int cuLaunchKernel(ipc::Function function, unsigned blocks, unsigned, unsigned, unsigned, unsigned,
                   unsigned, unsigned, ipc::Stream stream, void** arguments, void**) {
  auto* launch = new Launch{
      .kernel = *static_cast<Kernel*>(function), .grid = {}, .round = {}, .messages = {}};
  const bool is_message = launch->kernel.name == "lockstep_message";
  const int threads = number_of("FAKE_CUDA_THREADS", 1);
  launch->grid = {blocks, static_cast<unsigned>(threads), is_message || threads > 1};
  if (is_message) {
    launch->messages = *static_cast<ipc::Messages*>(arguments[0]);
  } else {
    launch->round = *static_cast<ipc::Round*>(arguments[0]);
    most_blocks = std::max(most_blocks, blocks);
  }
  enqueue(stream, [own = std::shared_ptr<Launch>(launch)] {
    fake::run_grid(own->grid, &Launch::run, own.get());
  });
  return 0;
}
int cuStreamSynchronize(ipc::Stream stream) {
  if (stream == nullptr) return 0;  // the default one does nothing here
  auto* handle = static_cast<FakeStreamHandle*>(stream);
  handle->finish(handle);
  return 0;
}

const char* nvrtcGetErrorString(int) { return "NVRTC_ERROR_COMPILATION"; }
int nvrtcCreateProgram(ipc::Program* program, const char* source, const char*, int,
                       const char* const*, const char* const*) {
  *program = new Compiled{source, {}, {}};
  return 0;
}
int nvrtcDestroyProgram(ipc::Program* program) {
  delete static_cast<Compiled*>(*program);
  return 0;
}
int nvrtcCompileProgram(ipc::Program program, int count, const char* const* options) {
  auto& own = *static_cast<Compiled*>(program);
  if (std::getenv("FAKE_NVRTC_FAILS") != nullptr) return 6;
  bool keeps_bits = false;
  for (int i = 0; i < count; ++i) {
    keeps_bits = keeps_bits || std::string_view(options[i]) == "--fmad=false";
    own.binary += std::string(options[i]) + "\n";
  }
  return keeps_bits ? 0 : 6;
}
int nvrtcGetProgramLogSize(ipc::Program, size_t* size) {
  *size = sizeof "kernels.cu(1): error: told by FAKE_NVRTC_FAILS";
  return 0;
}
int nvrtcGetProgramLog(ipc::Program, char* log) {
  std::strcpy(log, "kernels.cu(1): error: told by FAKE_NVRTC_FAILS");
  return 0;
}
int nvrtcGetCUBINSize(ipc::Program program, size_t* size) {
  *size = static_cast<Compiled*>(program)->binary.size();
  return 0;
}
int nvrtcGetCUBIN(ipc::Program program, char* binary) {
  const std::string& own = static_cast<Compiled*>(program)->binary;
  std::memcpy(binary, own.data(), own.size());
  return 0;
}

}  // extern "C"
