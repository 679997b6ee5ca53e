// Blocks that call what is not an ordinary module: one whose arguments are objects and are assigned
// to, and a scripted one whose forward assigns to a buffer.
#include <torch/script.h>
#include <torch/torch.h>

#include "lockstep/parallel/call.h"
#include "random/training/net.h"

namespace lockstep::test::training {
namespace {

struct Knobs {
  double scale = 1;
  at::Tensor shift;
};
using Named = std::map<std::string, at::Tensor>;

struct Assigning : torch::nn::Module {
  Assigning() { weight = register_parameter("weight", own_values()); }
  void forward(at::Tensor& x, std::vector<at::Tensor>& trail, const Knobs& knobs,
               const Named& named) {
    trail.push_back(x);
    x = torch::tanh(at::matmul(x, weight)) * knobs.scale + knobs.shift;
    trail.push_back(x * named.at("factor"));
  }
  static at::Tensor own_values() { return torch::randn({kFeatures, kFeatures}, at::kDouble) * 0.4; }
  at::Tensor weight;
};

struct AssigningBlock : Block {
  AssigningBlock() { inner = register_module("inner", std::make_shared<Assigning>()); }
  at::Tensor forward(const at::Tensor& x, const at::Tensor&, const Moment& moment) override {
    at::Tensor y = x;
    std::vector<at::Tensor> trail;
    Knobs knobs{0.5 + moment.lane, at::full({kFeatures}, 0.1 * moment.step, at::kDouble)};
    Named named{{"factor", at::full({}, 0.3 * (1 + moment.micro), at::kDouble)}};
    lockstep::call(inner, y, trail, knobs, named);
    // A second run has what the first had.
    knobs = {};
    named.clear();
    return y + trail.at(0) + trail.at(1);
  }
  std::shared_ptr<Assigning> inner;
};

struct ScriptBlock : Block {
  ScriptBlock()
      : inner("Script"), mean(register_buffer("mean", at::zeros({kFeatures}, at::kDouble))) {
    weight = register_parameter("weight", Assigning::own_values());
    inner.register_parameter("weight", weight, /*is_buffer=*/false);
    inner.register_buffer("mean", mean);
    inner.define(R"(
def forward(self, x, training: bool):
  if training:
    self.mean = 0.9 * self.mean + 0.1 * torch.mean(x.detach(), [0])
  return torch.tanh(torch.mm(x, self.weight)) + self.mean
)");
  }
  at::Tensor forward(const at::Tensor& x, const at::Tensor&, const Moment&) override {
    // Bits of what it compiles for later calls depend on how many calls a process has made.
    const torch::jit::GraphOptimizerEnabledGuard as_written(false);
    const at::Tensor y = inner.forward({x, is_training()}).toTensor();
    mean = inner.attr("mean").toTensor();
    return y;
  }
  const torch::jit::Module* script() const override { return &inner; }
  torch::jit::Module inner;
  at::Tensor& mean;  // the buffer itself, which becomes another tensor
  at::Tensor weight;
};

}  // namespace

void add_called_blocks(std::map<std::string, MakeBlock>& table) {
  table["assigning"] = [](Random&, const Group&) { return std::make_shared<AssigningBlock>(); };
  table["script"] = [](Random&, const Group&) { return std::make_shared<ScriptBlock>(); };
}

}  // namespace lockstep::test::training
