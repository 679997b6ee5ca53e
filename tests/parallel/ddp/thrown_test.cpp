// A backward() that threw on all ranks, with collectives in flight: what comes next is as if it had
// not been.
#include "lockstep/core/error.h"
#include "parallel/reference.h"
#include "support/spawn.h"

namespace lockstep::test {
namespace {

// Throws where the first layer's gradients would come, when those of later layers are on their way.
// Rank 1 takes part only when rank 0 has thrown, and is in the backward() that follows.
void throw_in_backward(Mlp& net, World& world) {
  if (world.rank() == 1) (void)world.store().get("rank 0 goes on");
  const auto hook = net.first->bias.register_hook(
      [](const at::Tensor&) -> at::Tensor { throw std::runtime_error("mine"); });
  EXPECT_THROW(square_loss(net, world.rank(), 1).backward(), std::runtime_error);
  net.first->bias.remove_hook(hook);
}

// Its first gradient lets rank 1 take part in what is in flight.
at::Tensor telling_loss(Mlp& net, World& world, int step) {
  const at::Tensor loss = square_loss(net, world.rank(), step);
  loss.register_hook([&world](const at::Tensor&) {
    if (world.rank() == 0) world.store().set("rank 0 goes on", "");
  });
  return loss;
}

void expect_near(const std::vector<at::Tensor>& got, const std::vector<at::Tensor>& want) {
  ASSERT_EQ(got.size(), want.size());
  for (size_t i = 0; i < got.size(); ++i) EXPECT_TRUE(at::allclose(got[i], want[i], 1e-5, 1e-7));
}

const DdpOptions kManyBuckets{.bucket_bytes = {1, 1}};

TEST(DdpThrown, GradientsUnderHoldComeAfterWhatIsInFlight) {
  spawn(2, [](World& world) {
    Mlp net;
    Ddp ddp(net, world.group(), kManyBuckets);
    square_loss(net, world.rank()).backward();
    ddp.zero_grad();
    throw_in_backward(net, world);
    ddp.zero_grad();
    {
      const auto hold = ddp.hold();
      telling_loss(net, world, 2).backward();
    }
    square_loss(net, world.rank(), 3).backward();
    expect_near(gradients(net), average_gradients(2, make_mlp, [](Mlp& m, int r) {
                  return square_loss(m, r, 2) + square_loss(m, r, 3);
                }));
  });
}

TEST(DdpThrown, AnOptimizersZerosStay) {
  spawn(2, [](World& world) {
    Mlp net;
    Ddp ddp(net, world.group(), kManyBuckets);
    torch::optim::SGD sgd(net.parameters(), 0.1);
    square_loss(net, world.rank()).backward();
    sgd.zero_grad(/*set_to_none=*/false);
    throw_in_backward(net, world);
    sgd.zero_grad(/*set_to_none=*/false);
    telling_loss(net, world, 2).backward();
    expect_near(gradients(net),
                average_gradients(2, make_mlp, [](Mlp& m, int r) { return square_loss(m, r, 2); }));
  });
}

// Averages, and throws when it is told to: once, or for each bucket.
class Throwing : public CommHook {
 public:
  enum class At { Never, Start, Then, EachThen };
  At at = At::Never;

  std::string_view name() const override { return "throwing"; }
  comm::Work start(const Group& group, const parallel::Bucket& bucket) override {
    if (bucket.last) throw_once(At::Start);
    return comm::then(group.all_reduce(bucket.flat, ReduceOp::Average),
                      [this, each = at == At::EachThen] {
                        if (each) throw std::runtime_error("the hook's");
                        throw_once(At::Then);
                        return comm::Work();
                      });
  }
  int64_t bytes_sent() const override { return 0; }

 private:
  void throw_once(At here) {
    if (at != here) return;
    at = At::Never;
    throw std::runtime_error("the hook's");
  }
};

TEST(DdpThrown, AHooksExceptionIsThrownOnce) {
  spawn(2, [](World& world) {
    Mlp net;
    const auto hook = std::make_shared<Throwing>();
    Ddp ddp(net, world.group(), {.bucket_bytes = {1, 1}, .hook = hook});
    for (const auto where : {Throwing::At::Start, Throwing::At::Then, Throwing::At::EachThen}) {
      hook->at = where;
      EXPECT_THROW(square_loss(net, world.rank(), 1).backward(), std::runtime_error);
      hook->at = Throwing::At::Never;
      ddp.zero_grad();
      square_loss(net, world.rank(), 2).backward();
      expect_near(gradients(net), average_gradients(2, make_mlp, [](Mlp& m, int r) {
                    return square_loss(m, r, 2);
                  }));
      ddp.zero_grad();
    }
  });
}

// Rank 1 takes part in what rank 0 left in flight when that has zeroed its gradients.
TEST(DdpThrown, AnOptimizersZerosStayAfterAHooksException) {
  spawn(2, [](World& world) {
    Mlp net;
    const auto hook = std::make_shared<Throwing>();
    Ddp ddp(net, world.group(), {.bucket_bytes = {1, 1}, .hook = hook});
    torch::optim::SGD sgd(net.parameters(), 0.1);
    square_loss(net, world.rank()).backward();
    sgd.zero_grad(/*set_to_none=*/false);
    if (world.rank() == 1) (void)world.store().get("rank 0 goes on");
    hook->at = Throwing::At::Start;
    EXPECT_THROW(square_loss(net, world.rank(), 1).backward(), std::runtime_error);
    sgd.zero_grad(/*set_to_none=*/false);
    telling_loss(net, world, 2).backward();
    expect_near(gradients(net),
                average_gradients(2, make_mlp, [](Mlp& m, int r) { return square_loss(m, r, 2); }));
  });
}

// refresh() in between, as after unfreezing a layer: what was held is averaged all the same.
TEST(DdpRefresh, KeepsWhatWasHeld) {
  spawn(2, [](World& world) {
    Mlp net;
    Ddp ddp(net, world.group());
    const auto of_first = [](Mlp& m, int r) { return m.first(input(r, 3)).sum(); };
    {
      const auto hold = ddp.hold();
      square_loss(net, world.rank(), 2).backward();
    }
    ddp.refresh();
    of_first(net, world.rank()).backward();
    expect_near(gradients(net), average_gradients(2, make_mlp, [&](Mlp& m, int r) {
                  return square_loss(m, r, 2) + of_first(m, r);
                }));
  });
}

}  // namespace
}  // namespace lockstep::test
