// PowerSgd with gradients of any size.
#include "lockstep/parallel/hooks.h"
#include "parallel/reference.h"
#include "support/spawn.h"

namespace lockstep::test {
namespace {

class Matrix : public torch::nn::Module {
 public:
  explicit Matrix(at::ScalarType dtype) {
    values = register_parameter("values", at::zeros({64, 64}, dtype));
  }
  at::Tensor values;
};

// A gradient of rank 1, which rank 1 represents but for rounding, in each of several passes.
TEST(PowerSgdSizes, AGradientOfRankOneComesThroughInEveryPass) {
  struct Case {
    at::ScalarType dtype;
    double size, tolerance;
  };
  spawn(2, [](World& world) {
    for (const auto& [dtype, size, tolerance] :
         {Case{at::kHalf, 10, 2e-3}, Case{at::kHalf, 1e-5, 1e-2}, Case{at::kBFloat16, 1e-21, 2e-2},
          Case{at::kFloat, 1e-24, 1e-5}, Case{at::kFloat, 1e18, 1e-5}}) {
      torch::manual_seed(1);
      const at::Tensor column = at::rand({64, 1}, at::kDouble) + 0.5;
      const at::Tensor gradient = column.mm(at::rand({1, 64}, at::kDouble) + 0.5) * size;
      const auto net = std::make_shared<Matrix>(dtype);
      const auto hook = std::make_shared<PowerSgd>(
          PowerSgdOptions{.rank = 1, .start_iteration = 1, .error_feedback = false});
      Ddp ddp(net, world.group(), {.hook = hook});
      for (int pass = 0; pass < 6; ++pass) {
        ddp.zero_grad();
        // Nothing is learned in pass 3, as where all labels are masked.
        (net->values * gradient.to(dtype) * (pass == 3 ? 0 : 1)).sum().backward();
        const at::Tensor want = pass == 3 ? at::zeros_like(gradient) : gradient;
        const at::Tensor error = (net->values.grad().to(at::kDouble) - want).norm();
        EXPECT_LE(error.item<double>(), tolerance * gradient.norm().item<double>())
            << dtype << " " << size << ", pass " << pass;
      }
    }
  });
}

}  // namespace
}  // namespace lockstep::test
