// From a seed to a program; which parts do not go together.
#include <algorithm>
#include <bit>
#include <stdexcept>

#include "random/training/features.h"

namespace lockstep::test::training {
namespace {

const FeatureKind& kind_of(std::string_view name) {
  const auto found = std::ranges::find(all_features(), name, &FeatureKind::name);
  if (found == all_features().end()) {
    throw std::invalid_argument("there is no feature " + std::string(name));
  }
  return *found;
}

// What a part decides by itself, by a seed; of lanes it is their number.
uint64_t drawn_seed(const Program& program, std::string_view name, Random& random) {
  const uint64_t seed = random.next();
  if (name != "lanes") return seed % 1000;
  const auto least = static_cast<uint64_t>(program.ranks);
  return std::max(uint64_t{2} << seed % 3, std::bit_ceil(least));
}

// A pair that all ranks refuse, in place of what conflicts with it.
void add_refusal(Program& program, Random& random) {
  std::vector<Conflict> refused = conflicts();
  std::erase_if(refused, [](const Conflict& conflict) { return conflict.refusal.empty(); });
  const auto& pair = refused[static_cast<size_t>(random.below(std::ssize(refused)))];
  program.features.clear();
  program.layers.clear();
  if (program.ranks == 1) {
    program.ranks = 2;
    program.backend = "shm";
  }
  const auto is_in = [](const std::vector<std::string>& names, const std::string& name) {
    return std::ranges::count(names, name) > 0;
  };
  for (const auto& name : {pair.one, pair.other}) {
    Part part{name, drawn_seed(program, name, random)};
    // With as many lanes as ranks each rank's steps are those without.
    if (name == "lanes") part.seed = 8;
    if (is_in(optimizer_names(), name)) {
      program.optimizer = part;
    } else {
      (is_in(block_names(), name) ? program.layers : program.features).push_back(part);
    }
  }
  program.steps = 4;
}

}  // namespace

const std::vector<FeatureKind>& all_features() {
  static const auto kinds = [] {
    std::vector<FeatureKind> made;
    add_model_features(made);
    add_data_features(made);
    add_communication_features(made);
    add_averaging_features(made);
    add_failure_features(made);
    add_gradient_features(made);
    add_input_features(made);
    add_lane_features(made);
    add_lifetime_features(made);
    add_memory_features(made);
    add_module_features(made);
    add_optimizer_features(made);
    add_sharding_features(made);
    return made;
  }();
  return kinds;
}

std::vector<std::unique_ptr<Feature>> make_features(const Program& program) {
  std::vector<std::unique_ptr<Feature>> features;
  for (const auto& part : program.features) features.push_back(kind_of(part.name).make(part));
  return features;
}

Compared compared_with(const Program& program) {
  auto compared = Compared::OneProcess;
  for (const auto& part : program.features) {
    compared = std::max(compared, kind_of(part.name).compared);
  }
  return compared;
}

bool knows_only_samples(const Program& program) {
  for (const std::string_view layer : {"batch_norm", "dropout", "counter", "assigning", "script"}) {
    if (program.has_layer(layer)) return false;
  }
  // Roundings of a narrow dtype depend on the order of additions.
  for (const std::string_view layer :
       {"linear_float32", "linear_bfloat16", "linear_float16", "complex"}) {
    if (program.has_layer(layer)) return false;
  }
  return std::ranges::all_of(program.features,
                             [](const Part& part) { return kind_of(part.name).splits; });
}

void place(Program& program, std::string_view backend, Random& random) {
  program.backend = backend;
  program.hosts.clear();
  if (backend != "host-then-net") return;
  // Together, in turn, or one more on the first.
  for (int rank = 0, kind = static_cast<int>(random.below(3)); rank < program.ranks; ++rank) {
    program.hosts.push_back(kind == 0   ? rank * 2 / program.ranks
                            : kind == 1 ? rank % 2
                                        : rank > program.ranks / 2);
  }
}

Program variant_of(const Program& program) {
  Program other = program;
  other.variant = program.variant + 1;
  if (program.ranks == 1) return other;
  Random random(program.seed + 17);
  place(other, program.backend == "shm" ? random.pick({"tcp", "gloo", "host-then-net"}) : "shm",
        random);
  if (program.ranks == 2 && other.backend == "host-then-net") place(other, "tcp", random);
  return other;
}

Program on_other_ranks(const Program& program) {
  Program other = program;
  Random random(program.seed + 23);
  other.ranks = program.ranks > 1 ? 1 : static_cast<int>(random.between(2, program.lanes()));
  other.ranks = std::min(other.ranks, 5);
  place(other, other.ranks == 1 ? "solo" : random.pick({"shm", "tcp"}), random);
  return other;
}

Program compose(uint64_t seed) {
  Random random(seed * 1000003 + 1);
  Program program{.seed = seed, .optimizer = {}, .layers = {}, .features = {}};
  program.ranks = random.pick({1, 2, 2, 3, 3, 4, 5});
  program.steps = static_cast<int>(random.between(1, 4));
  const std::string backend = random.pick({"shm", "shm", "tcp", "gloo", "host-then-net"});
  if (program.ranks > 1) {
    place(program, program.ranks == 2 && backend == "host-then-net" ? "tcp" : backend, random);
  }
  const auto optimizers = optimizer_names();
  program.optimizer = {optimizers[static_cast<size_t>(random.below(std::ssize(optimizers)))],
                       random.next() % 1000};
  const auto names = block_names();
  for (auto count = random.between(0, 4); count > 0; --count) {
    const auto& name = names[static_cast<size_t>(random.below(std::ssize(names)))];
    if (!conflicts_with(program, name)) program.layers.push_back({name, random.next() % 1000});
  }
  std::vector<const FeatureKind*> kinds;
  for (const auto& kind : all_features()) kinds.push_back(&kind);
  for (size_t i = kinds.size(); i > 1; --i) {
    std::swap(kinds[i - 1], kinds[static_cast<size_t>(random.below(static_cast<int64_t>(i)))]);
  }
  const double share = random.pick({0.1, 0.2, 0.35});
  for (const FeatureKind* kind : kinds) {
    const bool chosen = random.chance(kind->name == "bucket_bytes" ? 0.7 : share);
    const auto part_seed = drawn_seed(program, kind->name, random);
    if (!chosen || !kind->applies(program) || conflicts_with(program, kind->name)) continue;
    program.features.push_back({kind->name, part_seed});
  }
  if (random.chance(0.03)) add_refusal(program, random);
  return program;
}

}  // namespace lockstep::test::training
