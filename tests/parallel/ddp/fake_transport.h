// A group of two in one process, whose other rank always says what this one says, and which writes
// down what it is asked.
#pragma once

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <string>
#include <vector>

#include "comm/transport.h"

namespace lockstep::test {

class FakeTransport : public comm::Transport {
 public:
  explicit FakeTransport(std::vector<std::string>& journal) : journal_(journal) {}

  std::string_view name() const override { return "fake"; }
  int rank() const override { return 0; }
  int size() const override { return 2; }
  std::chrono::milliseconds timeout() const override { return std::chrono::seconds(1); }
  bool deterministic() const override { return true; }

  comm::Work start(comm::Request&& request) override {
    if (request.what == comm::Collective::AllReduce) {
      EXPECT_EQ(request.op, ReduceOp::Average);
      journal_.push_back("reduce " + request.label);
    } else if (request.what == comm::Collective::AllGather) {
      for (int rank = 0; rank < 2; ++rank) {
        const auto part = request.outputs.size() == 2 ? request.outputs[rank]
                                                      : request.outputs[0].view(-1).chunk(2)[rank];
        part.copy_(request.inputs[0].view(part.sizes()));
      }
    } else {
      EXPECT_EQ(request.what, comm::Collective::Broadcast);
    }
    return {};
  }
  at::Tensor empty(at::IntArrayRef sizes, at::TensorOptions options) override {
    return at::zeros(sizes, options);
  }
  std::shared_ptr<Transport> subset(const std::vector<int>&, int) override { return nullptr; }

 private:
  std::vector<std::string>& journal_;
};

}  // namespace lockstep::test
