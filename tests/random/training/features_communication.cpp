// How gradients and buffers travel: sizes of buckets, dtypes, hooks.
#include <torch/torch.h>

#include <set>

#include "lockstep/parallel/hooks.h"
#include "random/training/features.h"

namespace lockstep::test::training {
namespace {

// Changes no bit.
struct BucketSizes : Feature {
  explicit BucketSizes(const Part& part) : seed(part.seed) {}
  static bool applies(const Program&) { return true; }
  void plan(Training& training) override {
    Random random(seed + static_cast<uint64_t>(training.program.variant));
    training.options.bucket_bytes.clear();
    for (auto count = random.between(1, 3); count > 0; --count) {
      training.options.bucket_bytes.push_back(random.pick<int64_t>({1, 8, 50, 200, 400, 1000}));
    }
  }
  uint64_t seed;
};

struct BufferModes : Feature {
  explicit BufferModes(const Part& part) : seed(part.seed) {}
  static bool applies(const Program& program) {
    return program.has_layer("batch_norm") || program.has_layer("counter") ||
           program.has_layer("sync_batch_norm");
  }
  void plan(Training& training) override {
    training.options.buffers = Random(seed).pick({Buffers::Average, Buffers::None});
    // Which lanes a rank runs depends on the number of ranks.
    if (training.program.lanes() > 0) training.options.buffers = Buffers::Average;
  }
  uint64_t seed;
};

// Between steps every rank gives them values of its own, and then they are alike again.
struct SyncedBuffers : Feature {
  explicit SyncedBuffers(const Part& part) : seed(part.seed) {}
  static bool applies(const Program& program) {
    return program.has_layer("batch_norm") || program.has_layer("counter") ||
           program.has_layer("sync_batch_norm");
  }
  void after_step(Training& training) override {
    const at::NoGradGuard no_grad;
    const bool changes = Random(seed + static_cast<uint64_t>(training.step)).chance(0.7);
    for (auto& lane : training.lanes) {
      for (auto& model : lane.models) {
        for (const auto& buffer : model.net->buffers()) {
          if (changes) buffer.add_(1 + lane.rank);
        }
        if (model.ddp) model.ddp->sync_buffers();
        if (model.fsdp) model.fsdp->sync_buffers();
      }
    }
    if (!training.alone) return;
    for (int model = 0; model < training.models; ++model) average_buffers(training, model);
  }
  uint64_t seed;
};

// All ranks refuse what some of them, or all, leave out.
struct UnusedError : Feature {
  explicit UnusedError(const Part&) {}
  static bool applies(const Program&) { return true; }
  void plan(Training& training) override { training.options.unused = Unused::Error; }
};

// Nothing is found: ranks are alike, but for what is their own.
struct CheckedEvery : Feature {
  explicit CheckedEvery(const Part& part) : seed(part.seed) {}
  static bool applies(const Program&) { return true; }
  void plan(Training& training) override {
    if (!drift_apart(training.program)) {
      training.options.check_same_every = Random(seed).between(1, 3);
    }
  }
  void begin(Training& training) override {
    // The first pass after refresh() compares, too.
    if (training.alone || drift_apart(training.program) || !Random(seed + 1).chance(0.5)) return;
    for (auto& model : training.lanes[0].models) model.ddp->include_in_check(*model.optimizer);
  }
  // A norm with gradients that are not alike does that to ranks, and it would be found.
  static bool drift_apart(const Program& program) {
    return program.has("ignore") && program.has("clip_norm");
  }
  uint64_t seed;
};

struct ReduceDtype : Feature {
  explicit ReduceDtype(const Part& part) : seed(part.seed) {}
  static bool applies(const Program&) { return true; }
  void plan(Training& training) override {
    training.options.reduce_dtype = Random(seed).pick({at::kDouble, at::kFloat});
  }
  uint64_t seed;
};

struct Ignored : Feature {
  explicit Ignored(const Part& part) : seed(part.seed) {}
  static bool applies(const Program& program) { return !program.layers.empty(); }
  void built(Training& training, const Net& net) override {
    auto& ignored = training.options.ignore;
    ignored.clear();
    Random random(seed);
    std::set<const void*> seen;  // a tied parameter goes by its first name
    for (const auto& item : net.named_parameters()) {
      const bool first = seen.insert(item.value().unsafeGetTensorImpl()).second;
      if (first && item.key() != "head" && random.chance(0.3)) ignored.push_back(item.key());
    }
  }
  uint64_t seed;
};

// The default, by way of a hook.
class AllReduce : public CommHook {
 public:
  std::string_view name() const override { return "test all_reduce"; }
  comm::Work start(const Group& group, const parallel::Bucket& bucket) override {
    if (group.size() == 1) return {};
    return comm::then(group.all_reduce(bucket.flat, ReduceOp::Average),
                      [] { return comm::Work(); });
  }
  int64_t bytes_sent() const override { return 0; }
};

struct AllReduceHook : Feature {
  explicit AllReduceHook(const Part&) {}
  static bool applies(const Program&) { return true; }
  void plan(Training& training) override {
    training.hook = [] { return std::make_shared<AllReduce>(); };
  }
};

struct CastingHook : Feature {
  explicit CastingHook(const Part& part) : seed(part.seed) {}
  static bool applies(const Program&) { return true; }
  void plan(Training& training) override {
    Random random(seed);
    const auto dtype = random.pick({at::kHalf, at::kBFloat16, at::kFloat});
    const parallel::CastOptions options{.error_feedback = random.chance(0.5)};
    training.hook = [=] { return std::make_shared<parallel::CastHook>(dtype, options); };
  }
  uint64_t seed;
};

struct PowerSgdHook : Feature {
  explicit PowerSgdHook(const Part& part) : seed(part.seed) {}
  static bool applies(const Program&) { return true; }
  void plan(Training& training) override {
    Random random(seed);
    const parallel::PowerSgdOptions options{.rank = random.between(1, 2),
                                            .start_iteration = random.between(1, 3),
                                            .warm_start = random.chance(0.5),
                                            .error_feedback = random.chance(0.5),
                                            .least_compression = random.pick({1.1, 2.0})};
    training.hook = [=] { return std::make_shared<parallel::PowerSgd>(options); };
  }
  uint64_t seed;
};

struct TopKHook : Feature {
  explicit TopKHook(const Part& part) : seed(part.seed) {}
  static bool applies(const Program&) { return true; }
  void plan(Training& training) override {
    Random random(seed);
    const parallel::TopKOptions options{.fraction = random.pick({0.1, 0.5}),
                                        .error_feedback = random.chance(0.5)};
    training.hook = [=] { return std::make_shared<parallel::TopK>(options); };
  }
  uint64_t seed;
};

}  // namespace

void add_communication_features(std::vector<FeatureKind>& kinds) {
  kinds.push_back(feature<BucketSizes>("bucket_bytes", Splits::Yes));
  kinds.push_back(feature<BufferModes>("buffers", Splits::Yes));
  kinds.push_back(feature<SyncedBuffers>("sync_buffers", Splits::No));
  kinds.push_back(feature<UnusedError>("unused_error", Splits::Yes));
  kinds.push_back(feature<CheckedEvery>("check_same_every", Splits::Yes));
  kinds.push_back(feature<ReduceDtype>("reduce_dtype", Splits::No));
  kinds.push_back(feature<Ignored>("ignore", Splits::No));
  kinds.push_back(feature<AllReduceHook>("hook_all_reduce", Splits::Yes));
  kinds.push_back(feature<CastingHook>("hook_cast", Splits::No, Compared::Ranks));
  kinds.push_back(feature<PowerSgdHook>("hook_power_sgd", Splits::No, Compared::Ranks));
  kinds.push_back(feature<TopKHook>("hook_top_k", Splits::No, Compared::Ranks));
}

}  // namespace lockstep::test::training
