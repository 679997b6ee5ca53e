#include "device/fake/kernels.h"

#include <sched.h>

#include <atomic>
#include <barrier>
#include <chrono>
#include <cstdlib>
#include <map>
#include <thread>
#include <tuple>
#include <vector>

// What CUDA gives a kernel.
namespace {

struct Index {
  unsigned x = 0;
};
struct Block {
  explicit Block(unsigned threads) : meeting(threads) {}
  std::barrier<> meeting;
  std::atomic<int> any[2] = {0, 0};
};
thread_local Index threadIdx, blockIdx, blockDim, gridDim;
thread_local Block* block = nullptr;
thread_local unsigned votes = 0;

void __syncthreads() { block->meeting.arrive_and_wait(); }

// Two sums take turns: one is cleared while the other is in use.
int __syncthreads_or(int own) {
  std::atomic<int>&now = block->any[votes % 2], &next = block->any[(votes + 1) % 2];
  ++votes;
  if (own != 0) now = 1;
  block->meeting.arrive_and_wait();
  const int result = now;
  block->meeting.arrive_and_wait();
  if (threadIdx.x == 0) next = 0;
  block->meeting.arrive_and_wait();
  return result;
}

}  // namespace

namespace lockstep::comm::cuda_ipc {
namespace {

inline void store_release(U64* at, U64 value) { __atomic_store_n(at, value, __ATOMIC_RELEASE); }
inline U64 load_acquire(const U64* at) { return __atomic_load_n(at, __ATOMIC_ACQUIRE); }
inline void pause() { sched_yield(); }
inline U32 add_one(U32* to) { return __atomic_fetch_add(to, 1, __ATOMIC_ACQ_REL); }

}  // namespace
}  // namespace lockstep::comm::cuda_ipc

#define __device__
#include "comm/cuda_ipc/kernels.cu"
#undef __device__

namespace lockstep::test::fake {
namespace {

namespace ipc = comm::cuda_ipc;

using Table = std::map<std::tuple<std::string, std::string, std::string>, CombineKernel>;

// Block 0's first thread is late in each call's first round.
template <class Combine>
struct Slow {
  void operator()(ipc::Combination all) const {
    static const char* const said = std::getenv("FAKE_CUDA_SLOW_MS");
    if (said != nullptr && all.turn.begin == 0 && blockIdx.x == 0 && threadIdx.x == 0)
      std::this_thread::sleep_for(std::chrono::milliseconds(std::atoi(said)));
    Combine{}(all);
  }
};

template <class T, int operation, int ranks>
void kernel(const ipc::Round& round) {
  ipc::run(round, Slow<ipc::CombineAll<T, operation, ranks>>{});
}

template <class T, int operation>
void add_operation(Table& table, const char* element) {
  const std::string number = std::to_string(operation);
  table[{element, number, "2"}] = &kernel<T, operation, 2>;
  table[{element, number, "3"}] = &kernel<T, operation, 3>;
  table[{element, number, "4"}] = &kernel<T, operation, 4>;
}

template <class T>
void add_float(Table& table, const char* element) {
  add_operation<T, ipc::Sum>(table, element);
  add_operation<T, ipc::Min>(table, element);
  add_operation<T, ipc::Max>(table, element);
  add_operation<T, ipc::Product>(table, element);
}

template <class T>
void add_whole(Table& table, const char* element) {
  add_float<T>(table, element);
  add_operation<T, ipc::And>(table, element);
  add_operation<T, ipc::Or>(table, element);
  add_operation<T, ipc::Xor>(table, element);
}

Table all() {
  Table table;
  add_float<float>(table, "float");
  add_float<double>(table, "double");
  add_float<ipc::Half>(table, "Half");
  add_float<ipc::Brain>(table, "Brain");
  add_float<ipc::E4M3>(table, "E4M3");
  add_float<ipc::E5M2>(table, "E5M2");
  add_operation<ipc::Complex<float>, ipc::Product>(table, "Complex<float>");
  add_operation<ipc::Complex<double>, ipc::Product>(table, "Complex<double>");
  add_whole<signed char>(table, "signed char");
  add_whole<short>(table, "short");
  add_whole<int>(table, "int");
  add_whole<long long>(table, "long long");
  add_whole<unsigned char>(table, "unsigned char");
  add_whole<unsigned short>(table, "unsigned short");
  add_whole<unsigned int>(table, "unsigned int");
  add_whole<unsigned long long>(table, "unsigned long long");
  return table;
}

void run_block(const Grid& grid, unsigned number, void (*kernel)(const void*),
               const void* argument) {
  Block own(grid.threads);
  const auto run_thread = [&](unsigned thread) {
    threadIdx.x = thread;
    blockIdx.x = number;
    blockDim.x = grid.threads;
    gridDim.x = grid.blocks;
    block = &own;
    votes = 0;
    kernel(argument);
    // As on a GPU, threads that have ended are not waited for.
    own.meeting.arrive_and_drop();
  };
  std::vector<std::thread> others;
  for (unsigned thread = 1; thread < grid.threads; ++thread)
    others.emplace_back([&, thread] { run_thread(thread); });
  run_thread(0);
  for (std::thread& thread : others) thread.join();
}

}  // namespace

CombineKernel combine_kernel(const Variant& variant) {
  static const Table table = all();
  const auto found = table.find({variant.element, variant.combine, variant.ranks});
  return found == table.end() ? nullptr : found->second;
}

void copy_kernel(const ipc::Round& round) { ipc::run(round, ipc::Nothing{}); }
void message_kernel(const ipc::Messages& messages) { ipc::run(messages); }

void run_grid(const Grid& grid, void (*kernel)(const void*), const void* argument) {
  std::vector<std::thread> blocks;
  for (unsigned number = 0; number < grid.blocks; ++number) {
    if (grid.at_once) {
      blocks.emplace_back([&, number] { run_block(grid, number, kernel, argument); });
    } else {
      run_block(grid, number, kernel, argument);
    }
  }
  for (std::thread& one : blocks) one.join();
}

}  // namespace lockstep::test::fake
