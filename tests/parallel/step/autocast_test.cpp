// What operations compute in under Autocast, and that nothing of it stays.
#include "lockstep/parallel/autocast.h"

#include <ATen/autocast_mode.h>

#include "parallel/reference.h"
#include "support/spawn.h"

namespace lockstep::test {
namespace {

using ::testing::HasSubstr;

const at::Device kCpu(at::kCPU);

at::ScalarType product_dtype() { return at::mm(at::ones({2, 2}), at::ones({2, 2})).scalar_type(); }

TEST(Autocast, ProductsAreNarrowAndLossesWide) {
  isolated([] {
    for (const auto dtype : {at::kBFloat16, at::kHalf}) {
      const Autocast autocast(kCpu, dtype);
      const auto product = at::mm(at::ones({2, 2}), at::ones({2, 2}));
      EXPECT_EQ(product.scalar_type(), dtype);
      EXPECT_EQ(at::mse_loss(product, product).scalar_type(), at::kFloat);
    }
    EXPECT_EQ(product_dtype(), at::kFloat);
  });
}

TEST(Autocast, GuardsNestAndAFloat32OneDisablesAPart) {
  isolated([] {
    const Autocast outer(kCpu, at::kBFloat16);
    {
      const Autocast inner(kCpu, at::kHalf);
      EXPECT_EQ(product_dtype(), at::kHalf);
      const Autocast none(kCpu, at::kFloat);
      EXPECT_EQ(product_dtype(), at::kFloat);
    }
    EXPECT_EQ(product_dtype(), at::kBFloat16);
  });
}

TEST(Autocast, AnExceptionRestoresWhatWasBefore) {
  isolated([] {
    const auto dtype = at::autocast::get_autocast_dtype(at::kCPU);
    try {
      const Autocast autocast(kCpu, at::kHalf);
      throw std::runtime_error("mine");
    } catch (const std::runtime_error&) {
    }
    EXPECT_FALSE(at::autocast::is_autocast_enabled(at::kCPU));
    EXPECT_EQ(at::autocast::get_autocast_dtype(at::kCPU), dtype);
    EXPECT_EQ(at::autocast::increment_nesting(), 1);
  });
}

// A cast of a weight is kept for the next use, so a weight that an optimizer has changed needs it
// gone.
TEST(Autocast, TheOutermostGuardsEndForgetsCastsOfWeights) {
  isolated([] {
    const auto weight = torch::ones({2, 2}).requires_grad_(true);
    const auto first_product = [&] {
      const Autocast autocast(kCpu, at::kBFloat16);
      {
        const Autocast inner(kCpu, at::kBFloat16);
        at::mm(at::ones({2, 2}), weight);
      }
      return at::mm(at::ones({2, 2}), weight)[0][0].item<double>();
    };
    EXPECT_EQ(first_product(), 2);
    weight.variable_data().fill_(3);
    EXPECT_EQ(first_product(), 6);
  });
}

TEST(Autocast, OtherDtypesAreRefusedBeforeAnythingChanged) {
  isolated([] {
    EXPECT_THROW(Autocast(kCpu, at::kDouble), ConfigError);
    EXPECT_EQ(at::autocast::increment_nesting(), 1);
  });
}

TEST(Precision, TheChoiceAndTheHeadersLineAgree) {
  isolated([] {
    const bool native = preferred_dtype(kCpu) == at::kBFloat16;
    EXPECT_THAT(describe_precision(kCpu, preferred_dtype(kCpu)),
                native ? HasSubstr("bfloat16 products (A") : HasSubstr("no native bfloat16"));
    EXPECT_THAT(describe_precision(kCpu, at::kHalf), HasSubstr("float16 products ("));
    EXPECT_EQ(preferred_dtype(at::Device(at::kMeta)), at::kFloat);
  });
}

// bfloat16 keeps 8 bits: losses of a few hundredths agree to two digits.
TEST(Autocast, B66_TrainsUnderDdpLikeFloat32) {
  spawn(2, [](World& world) {
    std::vector<double> last;
    for (const auto dtype : {at::kFloat, at::kBFloat16}) {
      Mlp net;
      Ddp ddp(net, world.group());
      torch::optim::SGD sgd(net.parameters(), 0.1);
      double loss = 0;
      for (int step = 0; step < 20; ++step) {
        ddp.zero_grad();
        const auto value = [&] {
          const Autocast autocast(kCpu, dtype);
          const auto y = net.forward(input(world.rank()));
          EXPECT_EQ(y.scalar_type(), dtype);
          return at::mse_loss(y, at::ones_like(y));
        }();
        value.backward();
        sgd.step();
        loss = value.item<double>();
      }
      last.push_back(loss);
      EXPECT_EQ(net.first->weight.grad().scalar_type(), at::kFloat);
    }
    EXPECT_NEAR(last[0], last[1], 0.02);
    EXPECT_NE(last[0], last[1]);
  });
}

}  // namespace
}  // namespace lockstep::test
