// All ranks of the job, and this one's place among them.
#pragma once

#include <ATen/core/Tensor.h>

#include <chrono>
#include <iosfwd>
#include <memory>
#include <string>

#include "lockstep/comm/group.h"
#include "lockstep/comm/key_value_store.h"

namespace lockstep::comm {

// Which transport carries the world's group.
enum class Backend {
  Auto,  // GPUs: Nccl; else one host: Shm; several: HostThenNet, or Tcp when each has one rank
  Shm,
  Gloo,         // TCP by libtorch's Gloo, which Python ranks speak
  HostThenNet,  // shared memory within a host, tcp between hosts; needs several of each
  Nccl,         // a GPU for each rank; CPU tensors go as with Auto without GPUs
  CudaIpc,      // ranks of one host that read each other's GPU memory, also several on one GPU
  Tcp,  // connections of our own, which only ranks of the job can make; LOCKSTEP_NET=gloo puts
        // gloo in its place in Auto and HostThenNet
};

// What the ranks compute on.
enum class DeviceKind {
  Auto,  // GPUs where there are any that libtorch can use, unless a backend for CPUs was asked for
  Cpu,
  Cuda,
};

// How the ranks of a job find each other. An environment variable that is set overrides its option.
struct WorldOptions {
  // LOCKSTEP_BACKEND (shm, tcp, gloo, host-then-net, nccl, cuda_ipc; auto is as not set) overrides
  // it.
  Backend backend = Backend::Auto;
  // LOCKSTEP_DEVICE (cpu, cuda; auto is as not set) overrides it. The same on all ranks.
  DeviceKind device = DeviceKind::Auto;
  // How long a rank waits for the others before the wait fails (CallOptions::timeout says what
  // counts as a wait). LOCKSTEP_TIMEOUT (seconds) overrides it.
  std::chrono::milliseconds timeout = std::chrono::minutes(5);
  // Encrypts what ranks send each other over the network: TLS 1.3, by the job's secret
  // (docs/transports.md). Only tcp can, so from_env() throws ConfigError where Gloo would send
  // something or, with GPUs on several hosts, NCCL, and where several ranks have no secret. The
  // same on all ranks. LOCKSTEP_TLS (0, 1) overrides it.
  bool tls = false;
  // Some ranks are Python processes that called torch.distributed.init_process_group("gloo"). Needs
  // Gloo; the ranks then do not check each other's world size and versions at the start.
  // LOCKSTEP_PYTHON_PEERS=1 sets it.
  bool python_peers = false;
};

// A value handle: copies are the same world. A process may make several worlds: the n-th call of
// from_env() on each rank makes one world of all ranks. Each leaves some kilobytes (3 to 6 with two
// ranks over shm) in rank 0's store, which is there until rank 0's process exits, and takes no more
// than 256 MiB: make worlds at a program's start, not in each of its steps. A program that rank 0
// starts and waits for cannot serve at the same port: its ranks need another MASTER_PORT. One that
// takes its place (exec()) can.
//
// A world of one rank opens no socket and no shared memory, none of its calls waits, and libtorch
// keeps its own number of threads.
class World {
 public:
  // This process's rank and the size of the job come from its launcher's variables: `lockstep
  // run`'s, torchrun's, mpirun's, srun's (lockstep/core/place.h); without any, a world of one.
  // Where OMP_NUM_THREADS is not set, libtorch computes with the same number of threads on all
  // ranks, at most this rank's share of the cores that it may use, and at most what
  // at::set_num_threads() was given before; every thread of the process takes over that number when
  // it first allocates memory for a tensor. glibc's malloc keeps up to 64 MiB of freed memory,
  // unless the user has set its thresholds. Every rank calls it; blocks until all have. Throws
  // ConfigError for variables that are missing or contradict each other, or when there are fewer
  // GPUs than ranks on a host; CommError when ranks do not come within the deadline or disagree on
  // the world's size. In a world of several the process ignores SIGPIPE from then on, unless it has
  // a handler: a lost peer is an error, and does not end this process. In any world the soft limit
  // of open descriptors (`ulimit -n`) becomes the hard one, 524,288 at most, also for programs that
  // this process starts from then on. A standard stream that was closed when the program started
  // is open on /dev/null from then on, also after solo().
  static World from_env(WorldOptions options = {});

  // A world of one rank, regardless of the environment.
  static World solo();

  // This process's number in the job, from 0, and how many ranks the job has.
  int rank() const;
  int size() const;
  // This rank among those of its host, and how many those are.
  int local_rank() const;
  int local_size() const;
  bool is_main() const { return rank() == 0; }
  // std::cout on rank 0; on the other ranks a stream that writes nothing.
  std::ostream& main_out() const;

  // The device of this rank's tensors: cpu, or the GPU whose number is its local rank (the only
  // one, where it sees one; with CudaIpc in turn, where there are fewer), which from_env() has made
  // the current device. Programs that do not link libtorch's CUDA part call from_env() before the
  // first libtorch call that asks for CUDA: libtorch remembers that there was none.
  at::Device device() const;
  // All ranks of the job.
  const Group& group() const;
  // A key-value store that the ranks of this world share; its keys are separate from those of other
  // worlds.
  const KeyValueStore& store() const;
  // A world may be given wherever a group is expected, as the group of all ranks.
  operator const Group&() const { return group(); }  // NOLINT(google-explicit-constructor)

  // One line for a program's header: "2 ranks on 1 host, shm, 1 thread each"; "tcp with TLS" where
  // what goes over the network is encrypted; and where this rank may use a part of the host's cores
  // only ", rank 0 on cores 0-3".
  std::string describe() const;

 private:
  struct State;
  explicit World(std::shared_ptr<const State> state) : state_(std::move(state)) {}
  std::shared_ptr<const State> state_;
};

}  // namespace lockstep::comm

namespace lockstep {
using comm::World;
}  // namespace lockstep
