// A training of many features that saves as it goes, and goes on where it was: `resume_trainer
// DIRECTORY TRACE STEPS EVERY SEED FEATURE...` under `lockstep run`. Every rank adds a line to
// TRACE.RANK for each step: its number and the bits of its loss.
#include <fcntl.h>
#include <fmt/format.h>
#include <torch/torch.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <limits>

#include "lockstep/lockstep.h"

namespace lockstep::test {
namespace {

namespace nn = torch::nn;
namespace optim = torch::optim;

constexpr int64_t kLanes = 4;

struct Plan {
  std::string directory, trace;
  int64_t steps = 0, every = 0, seed = 0;
  std::vector<std::string> features;

  bool has(std::string_view feature) const {
    return std::find(features.begin(), features.end(), feature) != features.end();
  }
};

struct NetImpl : nn::Module {
  explicit NetImpl(const World& world, const Plan& plan) {
    first = register_module("first", nn::Linear(12, 24));
    if (plan.has("batch_norm")) norm = register_module("norm", nn::BatchNorm1d(24));
    if (plan.has("sync_batch_norm")) {
      sync = register_module("sync",
                             SyncBatchNorm1d(nn::BatchNormOptions(24), world.group().split(0)));
    }
    if (plan.has("dropout")) dropout = register_module("dropout", nn::Dropout(0.2));
    table = register_module("table",
                            nn::Embedding(nn::EmbeddingOptions(9, 24).sparse(plan.has("sparse"))));
    second = register_module("second", nn::Linear(24, 24));
    tied = register_parameter("tied", second->weight);
    unused = register_parameter("unused", torch::randn({7}));
    last = register_module("last", nn::Linear(24, 1));
  }
  torch::Tensor forward(const torch::Tensor& x) {
    auto y = torch::tanh(first(x));
    if (norm) y = norm(y);
    if (sync) y = sync(y);
    y = y + table(x.select(1, 0).abs().mul(4).floor().clamp(0, 8).to(torch::kLong));
    if (dropout) y = dropout(y);
    return last(torch::tanh(second(y)));
  }
  nn::Linear first{nullptr}, second{nullptr}, last{nullptr};
  nn::BatchNorm1d norm{nullptr};
  SyncBatchNorm1d sync{nullptr};
  nn::Dropout dropout{nullptr};
  nn::Embedding table{nullptr};
  torch::Tensor tied, unused;
};
TORCH_MODULE(Net);

std::unique_ptr<optim::Optimizer> inner_optimizer(const Plan& plan,
                                                  std::vector<optim::OptimizerParamGroup> groups) {
  using Groups = std::vector<optim::OptimizerParamGroup>;
  Groups all = std::move(groups);
  if (plan.has("sgd")) {
    return std::make_unique<optim::SGD>(all, optim::SGDOptions(0.05).momentum(0.9).nesterov(true));
  }
  if (plan.has("fused_sgd")) {
    return std::make_unique<FusedSGD>(all,
                                      optim::SGDOptions(0.05).momentum(0.9).weight_decay(1e-3));
  }
  if (plan.has("fused_adam")) return std::make_unique<FusedAdam>(all, optim::AdamOptions(0.01));
  if (plan.has("rmsprop")) {
    return std::make_unique<optim::RMSprop>(
        all, optim::RMSpropOptions(0.005).momentum(0.5).centered(true));
  }
  if (plan.has("adagrad"))
    return std::make_unique<optim::Adagrad>(all, optim::AdagradOptions(0.05));
  if (plan.has("adamw")) {
    return std::make_unique<optim::AdamW>(all, optim::AdamWOptions(0.01).amsgrad(true));
  }
  return std::make_unique<optim::Adam>(all, optim::AdamOptions(0.01));
}

std::shared_ptr<CommHook> make_hook(const Plan& plan) {
  if (plan.has("power_sgd")) {
    return std::make_shared<PowerSgd>(
        PowerSgdOptions{.start_iteration = 8, .least_compression = 1.01});
  }
  if (plan.has("top_k")) return std::make_shared<TopK>(TopKOptions{.fraction = 0.2});
  if (plan.has("cast")) {
    return std::make_shared<CastHook>(at::kBFloat16, CastOptions{.error_feedback = true});
  }
  if (plan.has("local_sgd"))
    return std::make_shared<LocalSgd>(LocalSgdOptions{.start_iteration = 20});
  return nullptr;
}

class Trace {
 public:
  explicit Trace(const std::string& path)
      : fd_(open(path.c_str(), O_WRONLY | O_CREAT | O_APPEND, 0644)) {}
  ~Trace() { close(fd_); }
  void add(int64_t step, double loss) const {
    const std::string line = fmt::format("{} {:a}\n", step, loss);
    if (write(fd_, line.data(), line.size()) < 0) std::perror("trace");
  }

 private:
  int fd_;
};

data::Sample shaken(data::Sample sample) {
  return {sample.data + 0.1 * torch::randn_like(sample.data), sample.target};
}

// What a loader gives, epoch after epoch: `of(number)` is an epoch's range.
template <class Range>
class Endless {
 public:
  Endless(Loader& loader, Range (Loader::*of)(int64_t)) : loader_(loader), of_(of) {}
  auto next() {
    if (at_) ++*at_;
    while (!at_ || *at_ == std::default_sentinel) {
      at_.reset();
      epoch_.emplace((loader_.*of_)(loader_.state().epoch));
      at_.emplace(epoch_->begin());
    }
    return **at_;
  }

 private:
  Loader& loader_;
  Range (Loader::*of_)(int64_t);
  std::optional<Range> epoch_;
  std::optional<typename Range::Iterator> at_;
};

void train(const World& world, const Plan& plan) {
  const at::Tensor inputs = at::randn({209, 12}, at::make_generator<at::CPUGeneratorImpl>(5));
  const data::TensorDataset samples(inputs, inputs.sum(1, /*keepdim=*/true).sin());
  const bool loads_ahead = plan.has("prefetch");
  data::LoaderOptions loading{.batch_size = 5,
                              .seed = plan.seed,
                              .drop_last = plan.has("drop_last"),
                              .prefetch = loads_ahead ? 3 : 0,
                              .workers = loads_ahead ? 2 : 0,
                              .lanes = plan.has("lanes") ? kLanes : 0};
  if (plan.has("transforms")) loading.transforms.emplace_back(shaken);
  Loader loader(samples, world, loading);

  seed_everything(plan.seed, world);
  Net net(world, plan);
  const auto hook = make_hook(plan);
  Ddp ddp(net, world, {.bucket_bytes = {700, 2000}, .hook = hook, .lanes = loading.lanes});
  std::vector<optim::OptimizerParamGroup> groups;
  groups.emplace_back(std::vector{net->first->weight, net->first->bias});
  std::vector<at::Tensor> others;
  for (const auto& parameter : net->parameters()) {
    const auto same = [&](const at::Tensor& one) { return one.is_same(parameter); };
    const auto& first = groups[0].params();
    if (std::none_of(first.begin(), first.end(), same) &&
        std::none_of(others.begin(), others.end(), same)) {
      others.push_back(parameter);
    }
  }
  groups.emplace_back(others);
  // Between two averages LocalSgd's ranks have parameters and moments of their own.
  CheckpointerOptions saving{.retention = {.keep_last = 2}, .async = plan.has("async")};
  if (plan.has("local_sgd")) saving.each_rank = {"net/*", "optimizer/*"};
  Checkpointer checkpoints(world, plan.directory, saving);
  checkpoints.track("net", net);
  std::unique_ptr<optim::Optimizer> optimizer;
  if (plan.has("zero")) {
    auto zero = std::make_unique<ZeroOptimizer>(
        groups, world, [&](auto all) { return inner_optimizer(plan, std::move(all)); },
        parallel::ZeroOptions{.share_parameters = plan.has("shared")});
    checkpoints.track("optimizer", *zero);
    optimizer = std::move(zero);
  } else {
    optimizer = inner_optimizer(plan, groups);
    checkpoints.track("optimizer", *optimizer);
  }
  GradScaler scaler(world,
                    {.init_scale = 1024, .growth_interval = 5, .enabled = plan.has("scaler")});
  LrScheduler cosine(*optimizer, cosine_restarts_lr({.first_steps = 30, .lowest_lr = 1e-3}));
  ReduceLrOnPlateau plateau(*optimizer, world, {.factor = 0.5, .patience = 3, .cooldown = 2});
  Averager averager(*net, {{world, 4}}, /*warm_up=*/5);
  GlobalMean mean(world);
  double running = 0;
  at::Tensor sums = at::zeros({3});
  checkpoints.track("scaler", scaler);
  checkpoints.track("cosine", cosine);
  checkpoints.track("plateau", plateau);
  checkpoints.track("averager", averager);
  checkpoints.track("loader", loader);
  checkpoints.track("running", running);
  checkpoints.track("sums", sums);
  checkpoints.track_generators();
  if (hook) checkpoints.track("hook", stateful(*hook, world));

  const auto found = checkpoints.restore_latest();
  const Trace trace(fmt::format("{}.{}", plan.trace, world.rank()));
  Endless batches(loader, &Loader::epoch);
  Endless lane_steps(loader, &Loader::steps);
  std::optional<LaneMean> lane_mean;
  if (plan.has("lanes")) lane_mean.emplace(ddp);
  const int micro = plan.has("accumulate") ? 3 : 1;
  for (int64_t step = found ? found->step : 0; step < plan.steps;) {
    ddp.zero_grad();
    double sum = 0;
    const auto backward_of = [&](const data::Batch& batch, bool overflows) {
      const auto& [x, y] = batch;
      auto loss = nn::functional::mse_loss(
          net->forward(x), y, nn::functional::MSELossFuncOptions().reduction(torch::kSum));
      const auto value = loss.item<double>();
      if (plan.has("global_mean")) {
        mean.add(x.size(0));
      } else {
        loss = loss / (15.0 * micro);
      }
      if (overflows && plan.has("overflow") && step % 11 == 7) {
        loss = loss * std::numeric_limits<double>::infinity();
      }
      scaler.scale(loss).backward();
      return value;
    };
    if (plan.has("lanes")) {
      const data::Step lanes = lane_steps.next();
      int64_t lane = lanes.lanes().begin;
      for (const auto& batch : ddp.lanes(lanes)) {
        lane_mean->add(backward_of(batch, lane++ == kLanes - 1));
      }
      sum = lane_mean->mean();
    } else {
      for (int i = 0; i < micro; ++i) {
        std::optional<parallel::Hold> hold;
        if (i + 1 < micro) hold.emplace(ddp.hold());
        sum += backward_of(batches.next(), world.rank() == world.size() - 1);
      }
    }
    if (plan.has("global_mean")) mean.scale_gradients_(net->parameters());
    if (plan.has("clip")) {
      scaler.unscale_(*optimizer);
      clip_grad_norm_(net->parameters(), 0.5);
    }
    scaler.step(*optimizer);
    scaler.update();
    if (plan.has("cosine")) cosine.step();
    if (plan.has("plateau")) plateau.step(sum);
    if (plan.has("averager")) averager.step();
    ++step;
    running = 0.9 * running + 0.1 * (plan.has("lanes") ? sum : sum_over_ranks(sum, world));
    sums[step % 3] = running;
    trace.add(step, sum);
    if (step == plan.steps || step % plan.every == 0) checkpoints.save(step);
  }
  checkpoints.finish();
}

}  // namespace
}  // namespace lockstep::test

int main(int argc, char** argv) {
  using namespace lockstep::test;
  if (argc < 6) return 2;
  Plan plan{argv[1],
            argv[2],
            std::stol(argv[3]),
            std::stol(argv[4]),
            std::stol(argv[5]),
            {argv + 6, argv + argc}};
  try {
    train(lockstep::World::from_env(), plan);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "error: %s\n", error.what());
    return 1;
  }
}
