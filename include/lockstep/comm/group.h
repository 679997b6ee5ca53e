// Groups of ranks, and their collectives and messages.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Stream.h>

#include <chrono>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "lockstep/comm/work.h"
#include "lockstep/core/compiler.h"

namespace lockstep::comm {

class Transport;
enum class Collective : int;
struct Request;

// How elements of the ranks are combined. Sum and Product are taken in the fixed binary tree over
// ranks (n ranks split at the largest power of two below n) by every transport that says
// deterministic(); each node of the tree rounds to the tensor's dtype (float8_e4m3fn, which has no
// infinity, to its largest number). Integers wrap. For bool, Sum and Max are "or", Product and Min
// "and". For complex numbers there are Sum, Average, PreMulSum and, on the CPU, Product.
enum class ReduceOp {
  Sum,
  Average,  // Sum, then one division by size(); integers truncate toward zero; not for bool, nor on
            // devices for uint64
  Min,      // a NaN on any rank gives NaN
  Max,
  Product,
  BitwiseAnd,  // integers and bool, on the CPU
  BitwiseOr,
  BitwiseXor,
  // Sum of what each rank has multiplied by CallOptions::factor and rounded to the dtype; for real
  // and complex floating-point numbers.
  PreMulSum,
};

// The object that makes a call (a Ddp, for instance) and the pass of it that the call belongs to.
// The same on all ranks.
struct CallContext {
  std::string_view name = {};  // what errors call the object ("Ddp"); 15 characters are kept
  uint32_t number = 0;         // which of them (Group::next_caller()); 0: the call has no context
  uint32_t pass = 0;           // 0: not given
};

// Options of one call.
struct CallOptions {
  // How long a rank waits for the others, in place of the group's own deadline. It bounds a wait,
  // not the operation: over shared memory it starts again at each synchronisation of the ranks
  // within the operation, so that an operation that makes progress may take longer in all; over
  // all other transports it is counted from the call, so that time between the call and wait()
  // counts too (the errors of host-then-net come up to a second after it). In calls that consist of
  // several collectives (the _bytes calls, for instance) it applies to each of them. With zero or
  // less a call that has to wait fails at once; ten years or more mean no timeout.
  std::optional<std::chrono::milliseconds> timeout = std::nullopt;
  // The call's name in error messages, for example "bucket 3". May differ between ranks. Errors
  // show 39 characters of it.
  std::string_view label = {};
  // Compared between the ranks of a collective like its dtype and counts, so that ranks which have
  // diverged (one has skipped a pass, or uses two objects in another order) get an error at the
  // first call that shows it.
  CallContext context = {};
  // A likely cause that errors add when ranks disagree about this call, or one does not make it:
  // "or one rank ran out of batches: see Join". 127 characters are kept.
  std::string_view advice = {};
  // What ReduceOp::Average divides the sum by, for ranks that each contribute a sum of several
  // addends; 0: size(). On the CPU. Compared between the ranks, like the counts. With any other
  // reduction, or in a call without one, ConfigError.
  int divide_by = 0;
  // What ReduceOp::PreMulSum multiplies this rank's elements by. May differ between ranks. With any
  // other reduction, or in a call without one, a factor other than 1 is a ConfigError.
  double factor = 1;
  // For tensors on a device: the operation begins after the work on this stream, and wait() makes
  // this stream wait, whichever stream is current. For tensors on the CPU it is refused.
  std::optional<c10::Stream> stream = std::nullopt;
};

// Of send_recv().
struct SendRecv {
  int to = 0;
  int from = 0;
  int tag = 0;
};

// A value handle: copies refer to the same group. One thread at a time may call a group; different
// groups are independent. Every rank of the group calls every collective, in the same order, with
// the same dtype and counts; if ranks disagree, all get a CommError that quotes both calls: at once
// over shm, over tcp as soon as data of the other call arrives, over gloo, nccl and cuda_ipc after
// one to two seconds, over host-then-net like shm or tcp where the calls meet in one of them, else
// after one to three seconds. (An exception: where the ranks of each host agree on a broadcast's
// root, and the hosts do not, each host gets its own root's data, perhaps without an error.) In a
// call in which nothing moves, such as one with tensors without elements, a rank does not wait for
// the others: over tcp its next call throws once data of another call has arrived in its place
// (where the others only receive, they wait until the deadline), over host-then-net the same, or at
// once within a host; over gloo the others wait until the deadline. After any CommError the group
// has failed: further calls throw CommError at once, which quotes the first. Wrong arguments on
// this rank alone throw ConfigError and leave the group as it was.
//
// Collectives, send() and recv() are asynchronous: they start the operation and return its Work,
// and the tensors may be used again when wait() has returned. These block: the _bytes calls,
// split(), subgroup(), empty() and shared() where they communicate, and, over gloo, nccl and
// cuda_ipc, gather(), scatter() and all_to_all() of lists, which first compare sizes.
//
// Tensors: of any strides (those that are not contiguous go through a copy), all on the CPU or all
// on a device that the group carries; float32/64, float16, bfloat16, float8_e4m3fn, float8_e5m2,
// int8/16/32/64, uint8/16/32/64, bool, complex64/128. On a device, the operations begin after the
// work on the caller's current stream (all of it, on the device of the tensors), and wait() makes
// the current stream wait, not the caller; failures are thrown by the next call or wait(). So only
// a barrier(), or reading a result, shows that everything before it has succeeded.
//
// CUDA graphs: over cuda_ipc, where kernels wait, a current stream that captures also captures the
// call; each launch of the graph is such a call, which all ranks make, with the captured timeout.
// wait() belongs to the captured part. Elsewhere such a call throws ConfigError (docs/groups.md).
//
// Aliasing: an output may share memory neither with another output of the call nor with itself (as
// expanded tensors and overlapping windows do); such calls are refused, except that a list which is
// combined or broadcast in place may have a tensor, or parts of it, twice. Of outputs with gaps
// that have more than 4096 elements in all, only those are seen that begin at the same place, have
// a dimension without a stride or need more room than there is. Inputs may overlap each other. One
// that shares memory with an output is copied first, unless, of contiguous tensors, an all_gather's
// `input` is this rank's part of `output` (of a list, outputs[rank()]), or a reduce_scatter's
// `output` this rank's part of `input` (not of a list). Until its Work is over, the memory of an
// operation belongs to it: no other operation may write what it reads, nor read or write what it
// writes.
//
// Autograd does not follow a tensor to other ranks: for a loss of what others have there is
// lockstep/parallel/functional.h. Rank 0 warns once of a tensor with a grad_fn.
//
// A child of this process by fork() has copies of its groups but is not a rank of them: its calls,
// and waits for operations started before, throw ConfigError that names the process to which the
// group belongs; destroying the copies does nothing. In a group of one it may go on.
//
// In a group of one nothing is communicated and nothing waits: outputs become copies of the inputs,
// on any device. Arguments are checked all the same.
class Group {
 public:
  // A group of one, which needs no transport.
  Group();

  // This process's number in the group, from 0, and how many ranks the group has.
  int rank() const;
  int size() const;
  // "solo", "shm", "tcp", "gloo", "host-then-net", "nccl", "cuda_ipc".
  std::string_view backend() const;
  // Whether sums are taken in the fixed tree, so that they depend neither on how the data was
  // divided nor on timing nor on the transport.
  bool deterministic() const;
  // Whether tensors there can be communicated: on the CPU always; over nccl also on
  // World::device(); in a group of one anywhere.
  bool carries(at::Device device) const;
  std::chrono::milliseconds timeout() const;
  // The next number for CallContext::number: 1, 2 and so on. Call it in the same order on every
  // rank; communicates nothing.
  uint32_t next_caller() const;
  // The world's numbers of this group's ranks: world_ranks()[r] is rank r of this group. Of a group
  // by join_group(), and of Group(), the world is the group itself.
  std::vector<int> world_ranks() const;
  // Which rank of `other`, of the same world, this group's `rank` is; nothing where it is none.
  std::optional<int> rank_in(const Group& other, int rank) const;
  // Whether ranks of Python's torch.distributed are in it (WorldOptions::python_peers). Such a rank
  // makes only the calls that its program makes, so everything that communicates by itself
  // (split(), Ddp and the like) refuses the group.
  bool has_python_ranks() const;
  // Throws ConfigError if there are, with the message that `who` ("Ddp", for instance) does not
  // support them.
  void refuse_python_ranks(std::string_view who) const;

  // Aborts the group on all its ranks: every call that waits in it, on any rank, and every later
  // one throws CommError that quotes `why`. Any thread of this rank may call it, also while another
  // waits. The other ranks learn of it at once over shared memory, within about a second otherwise.
  // Takes up to a second itself.
  void abort(std::string_view why) const noexcept;
  // Why the group can no longer be used, as far as this rank knows without waiting: an exception of
  // an earlier call, abort(), a rank that has aborted the group or (on one host) has ended, a
  // failure that the launcher or NCCL reports. Nothing while it works. The state of ranks on other
  // hosts is fetched in the background between calls, so call it from time to time. Belongs to the
  // thread that calls the group.
  std::optional<std::string> failure() const;

  // Combines `tensor` elementwise over all ranks, in place on all.
  Work all_reduce(const at::Tensor& tensor, ReduceOp op = ReduceOp::Sum,
                  const CallOptions& options = {}) const;
  // The same onto rank `root` only; the other ranks' tensors keep their values.
  Work reduce(const at::Tensor& tensor, int root, ReduceOp op = ReduceOp::Sum,
              const CallOptions& options = {}) const;

  // Rank r's output = the r-th of size() equal parts of `input` (along its elements in order),
  // combined over ranks. input.numel() == size() * output.numel().
  Work reduce_scatter(const at::Tensor& output, const at::Tensor& input,
                      ReduceOp op = ReduceOp::Sum, const CallOptions& options = {}) const;
  // The same with parts of unequal size: inputs[r] has rank r's count of elements, alike on every
  // rank.
  Work reduce_scatter(const at::Tensor& output, const std::vector<at::Tensor>& inputs,
                      ReduceOp op = ReduceOp::Sum, const CallOptions& options = {}) const;

  // output = the ranks' inputs one after another. output.numel() == size() * input.numel().
  Work all_gather(const at::Tensor& output, const at::Tensor& input,
                  const CallOptions& options = {}) const;
  // The same with inputs of unequal size: outputs[r] has as many elements as rank r's input.
  Work all_gather(const std::vector<at::Tensor>& outputs, const at::Tensor& input,
                  const CallOptions& options = {}) const;

  // Every rank's `tensor` becomes rank `root`'s.
  Work broadcast(const at::Tensor& tensor, int root = 0, const CallOptions& options = {}) const;

  // outputs on `root` become the ranks' inputs (sizes may differ); elsewhere outputs is empty.
  Work gather(const std::vector<at::Tensor>& outputs, const at::Tensor& input, int root = 0,
              const CallOptions& options = {}) const;
  // Rank r's output becomes inputs[r] of `root` (sizes may differ); elsewhere inputs is empty.
  Work scatter(const at::Tensor& output, const std::vector<at::Tensor>& inputs, int root = 0,
               const CallOptions& options = {}) const;

  // Rank r's part s goes to rank s as its part r; size() equal parts. output.numel() ==
  // input.numel().
  Work all_to_all(const at::Tensor& output, const at::Tensor& input,
                  const CallOptions& options = {}) const;
  // The same with parts of unequal size: outputs[s] has as many elements as rank s's
  // inputs[rank()].
  Work all_to_all(const std::vector<at::Tensor>& outputs, const std::vector<at::Tensor>& inputs,
                  const CallOptions& options = {}) const;

  // From one rank to another; only these two call it. `tag` tells apart messages between the same
  // two ranks: the receiver has to ask for them in the order in which they were sent, and a
  // different number is an error.
  //
  // Whether send's Work completes before the receiver has called recv() depends on the transport:
  // over shared memory a message of up to 512 bytes completes as soon as the one before it has been
  // received, a longer one may wait for its receiver; over tcp a send completes when its receiver
  // has called recv() and all of it has been handed to the kernel, over gloo when the receiver has
  // received it; over nccl messages are issued when the program waits for one, asks whether it is
  // completed, or calls the group's next collective. A program that works on every transport starts
  // its sends, then its receives, and waits for both.
  Work send(const at::Tensor& tensor, int to, int tag = 0, const CallOptions& options = {}) const;
  Work recv(const at::Tensor& tensor, int from, int tag = 0, const CallOptions& options = {}) const;

  // Sends `input` to one rank and receives `output` from another, or the same, where neither send
  // nor receive waits for the other. To and from this rank itself it is a copy.
  Work send_recv(const at::Tensor& output, const at::Tensor& input, const SendRecv& peers,
                 const CallOptions& options = {}) const;

  // Several tensors in one call, with the results of one call for each: they are copied into one
  // message for each dtype among them. The same dtypes and counts on every rank, in the same order;
  // all on one device.
  Work all_reduce(const std::vector<at::Tensor>& tensors, ReduceOp op = ReduceOp::Sum,
                  const CallOptions& options = {}) const;
  Work broadcast(const std::vector<at::Tensor>& tensors, int root = 0,
                 const CallOptions& options = {}) const;
  // Each output has size() times the elements of its input.
  Work all_gather(const std::vector<at::Tensor>& outputs, const std::vector<at::Tensor>& inputs,
                  const CallOptions& options = {}) const;
  // Each input has size() times the elements of its output.
  Work reduce_scatter(const std::vector<at::Tensor>& outputs, const std::vector<at::Tensor>& inputs,
                      ReduceOp op = ReduceOp::Sum, const CallOptions& options = {}) const;

  // Starts a barrier: its Work is over when every rank has called barrier(), and over nccl and
  // cuda_ipc also this rank's device has done all operations before it. To wait:
  // group.barrier().wait().
  Work barrier(const CallOptions& options = {}) const;

  // Byte strings, as of any serialised object; lengths may differ. They block. Two collectives
  // each: of the lengths, then of the bytes.
  std::vector<std::string> all_gather_bytes(std::string_view mine,
                                            const CallOptions& options = {}) const;
  // On `root` the ranks' strings in order, elsewhere nothing.
  std::vector<std::string> gather_bytes(std::string_view mine, int root = 0,
                                        const CallOptions& options = {}) const;
  // Rank root's string, on every rank.
  std::string broadcast_bytes(std::string_view mine, int root = 0,
                              const CallOptions& options = {}) const;

  // A zeroed contiguous tensor in the transport's own memory; over shm, and within a host over
  // host-then-net, over nccl, which registers it, and over cuda_ipc with more than 256 KiB (but not
  // where ranks take turns on a GPU), collectives on it make no copies; elsewhere it is ordinary
  // memory. Every rank calls it with the same sizes and dtype. Among ranks that share memory, of
  // the CPU or of GPUs, this communicates (small messages and a barrier) and blocks; elsewhere it
  // does not. Throws ConfigError for sizes below 0, for those whose product overflows and for a
  // dtype that has no gradients where `options` require them, and CommError when memory is short:
  // on all ranks where it communicates, elsewhere on those that have too little (over cuda_ipc it
  // is ordinary memory then). Freed with its last reference, on each rank by itself; other ranks
  // may go on using theirs. A child process made by fork() does not have this memory: it must not
  // touch it.
  at::Tensor empty(at::IntArrayRef sizes, at::TensorOptions options = {}) const;

  // One zeroed contiguous tensor that is the same memory on every rank: what a rank writes the
  // others see after the next barrier() or other collective of all. For tensors on the CPU, in a
  // group whose backend() is solo or shm, or of a device whose ranks are on one host; otherwise an
  // undefined tensor. Blocks until all ranks have called it. Every rank calls it with the same
  // sizes and dtype; no more than one rank may write an element between two such calls. So it
  // cannot be the output of a collective, such as all_reduce: all ranks would write the same
  // elements. It may be an input. As with empty(), a child process made by fork() does not have it.
  at::Tensor shared(at::IntArrayRef sizes, at::TensorOptions options = {}) const;

  // Every rank calls it; ranks of equal `color` form a new group, ordered by (key, rank). A
  // negative color joins none and gets a group of one. Communicates in this group (an
  // all_gather_bytes) and sets up the new one; blocks. Over gloo each group leaves some
  // kilobytes (5 with two ranks) in rank 0's store, as each World does.
  Group split(int color, int key = 0) const;
  // The same by a list, alike on every rank of this group, which all call it: its rank ranks[i] is
  // rank i of the new group; those that are not in it get a group of one. Throws ConfigError on all
  // ranks for lists that differ, ranks that are not in this group, and one that is in it twice.
  Group subgroup(const std::vector<int>& ranks) const;

  // The transport below. Private to the library.
  explicit Group(std::shared_ptr<Transport> transport);
  Transport& transport() const { return *transport_; }

 private:
  Work start(Request request, const CallOptions& options) const;
  void check_list(Collective what, const std::vector<at::Tensor>& tensors) const;
  Group part(std::vector<int> ranks, int color) const;

  std::shared_ptr<Transport> transport_;
};

}  // namespace lockstep::comm

namespace lockstep {
using comm::Group;
using comm::ReduceOp;
}  // namespace lockstep
