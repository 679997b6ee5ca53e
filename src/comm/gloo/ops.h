// Each collective as calls of c10d's Gloo group.
#pragma once

#include <functional>
#include <vector>

#include "comm/direct/exchange.h"
#include "comm/gloo/group.h"
#include "comm/gloo/transport.h"
#include "comm/gloo/worker.h"
#include "comm/transport.h"

namespace lockstep::comm {

// What is under way for one request.
struct GlooCall {
  std::vector<WireWork> works;
  // Writes the results to the request's tensors, once all works are over.
  std::function<void()> finish = [] {};
};

class GlooOps {
 public:
  // Waits for a work; throws when it failed.
  using Await = std::function<void(const WireWork&)>;

  GlooOps(c10::intrusive_ptr<GlooGroup> group, const GlooOptions& options);

  // Starts `request`. `checksum` is of what all ranks must agree on. Gloo itself times out after
  // `patience`. Calls with per-rank sizes first compare them, by way of `await`; throws CommError
  // when they do not fit together.
  GlooCall launch(const Request& request, uint32_t checksum, std::chrono::milliseconds patience,
                  const Await& await);

 private:
  GlooCall run_direct(const Request& request);
  GlooCall all_reduce(const Request& request);
  GlooCall reduce(const Request& request);
  GlooCall reduce_scatter(const Request& request);
  GlooCall all_gather(const Request& request);
  GlooCall all_gather_unequal(const Request& request);
  GlooCall broadcast(const Request& request);
  GlooCall all_to_all(const Request& request, const Await& await);
  GlooCall gather(const Request& request, const Await& await);
  GlooCall scatter(const Request& request, const Await& await);
  GlooCall message(const Request& request);
  GlooCall barrier();

  void next_tag();
  WireWork reduce_all(at::Tensor wire, c10d::ReduceOp op);
  WireWork broadcast_bytes(at::Tensor bytes, int root);
  // Byte counts per rank.
  WireWork exchange(at::Tensor output, std::vector<int64_t> in, at::Tensor input,
                    std::vector<int64_t> out);
  void compare_counts(const std::vector<int64_t>& in, const std::vector<int64_t>& out,
                      const Await& await);

  const c10::intrusive_ptr<GlooGroup> group_;
  const GlooPeers peers_;
  const int ranks_;
  const Direct direct_;
  Worker worker_;
  // Of the call being launched.
  uint32_t checksum_ = 0;
  std::chrono::milliseconds patience_{0};
  // Collectives put on the wire, and messages to and from each rank.
  uint32_t collectives_ = 0;
  std::vector<uint32_t> sent_ = std::vector<uint32_t>(group_->getSize());
  std::vector<uint32_t> received_ = std::vector<uint32_t>(group_->getSize());
};

}  // namespace lockstep::comm
