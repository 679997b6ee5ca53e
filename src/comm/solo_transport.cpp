// A group of one: every collective is a copy from the inputs to the outputs, or nothing.
#include <ATen/ATen.h>

#include "comm/assign.h"
#include "comm/reduce/reduction.h"
#include "comm/transport.h"

namespace lockstep::comm {
namespace {

// With the kernel of the other transports, so that it rounds as they do.
void divide(const Request& request) {
  for (const at::Tensor& output : request.outputs) {
    const void* source = data_of(output);
    void* target = data_of(output);
    const Reduction average = reduction_of(request, 1);
    reduce(average, &source, 1, &target, 1,
           static_cast<int64_t>(output.nbytes()) / size_of(average.element));
  }
}

class SoloTransport : public Transport {
 public:
  // Not bound to a process: a child by fork() may use a group of one.
  SoloTransport() : Transport(std::make_shared<Unfinished>()) {}

  std::string_view name() const override { return "solo"; }
  int rank() const override { return 0; }
  int size() const override { return 1; }
  std::chrono::milliseconds timeout() const override { return std::chrono::milliseconds::max(); }
  bool deterministic() const override { return true; }
  bool carries(at::Device) const override { return true; }

  Work start(Request&& request) override {
    const at::NoGradGuard no_grad;
    if (!request.inputs.empty() && !request.outputs.empty())
      assign(request.outputs.front().view({-1}), request.inputs.front().view({-1}));
    if (request.divide_by > 1 && request.op == ReduceOp::Average) divide(request);
    return {};
  }

  at::Tensor empty(at::IntArrayRef sizes, at::TensorOptions options) override {
    return at::zeros(sizes, options);
  }

  at::Tensor shared(at::IntArrayRef sizes, at::TensorOptions options) override {
    return at::zeros(sizes, options);
  }

  std::shared_ptr<Transport> subset(const std::vector<int>&, int) override {
    return make_solo_transport();
  }
};

}  // namespace

std::shared_ptr<Transport> make_solo_transport() { return std::make_shared<SoloTransport>(); }

}  // namespace lockstep::comm
