#include "lockstep/parallel/random.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Context.h>

#include <mutex>

#include "checkpoint/generators.h"
#include "core/hash/mix.h"
#include "parallel/step/rank_stream.h"

namespace lockstep::parallel {
namespace {

// Beside libtorch's default generators, which are the process's as well.
struct RankSeed {
  std::mutex mutex;
  bool given = false, pending = false;
  int64_t restored = 0;  // checkpoint::generators_restored() at that time
  uint64_t seed = 0;
  int rank = 0;
};

RankSeed& rank_seed() {
  static RankSeed instance;
  return instance;
}

}  // namespace

void seed_everything(uint64_t seed, const Group& group) {
  seed_everything(seed);
  auto& [mutex, given, pending, restored, its_seed, rank] = rank_seed();
  const std::lock_guard lock(mutex);
  given = true;
  pending = group.size() > 1;
  restored = checkpoint::generators_restored();
  its_seed = seed;
  rank = group.rank();
}

bool is_seeded_for_ranks() {
  const std::lock_guard lock(rank_seed().mutex);
  return rank_seed().given;
}

void begin_rank_stream() {
  auto& [mutex, given, pending, restored, seed, rank] = rank_seed();
  const std::lock_guard lock(mutex);
  // A checkpoint has each rank's own generator, which continues where it was.
  pending = pending && restored == checkpoint::generators_restored();
  if (pending && rank > 0) seed_everything(stream_seed({.seed = seed, .lane = rank}));
  pending = false;
}

void seed_everything(uint64_t seed) {
  at::manual_seed(seed);
  std::srand(static_cast<unsigned>(mix(seed)));
}

uint64_t stream_seed(const Stream& stream) {
  const uint64_t step = mix(mix(stream.seed) ^ static_cast<uint64_t>(stream.step));
  return mix(step ^ static_cast<uint64_t>(stream.lane));
}

RandomStream::RandomStream(const Stream& stream, at::Device device) {
  std::vector<at::Generator> generators{at::detail::getDefaultCPUGenerator()};
  if (!device.is_cpu()) generators.push_back(at::globalContext().defaultGenerator(device));
  for (auto& generator : generators) {
    const std::lock_guard lock(generator.mutex());
    saved_.push_back({generator, generator.get_state()});
    generator.set_current_seed(stream_seed(stream));
  }
}

RandomStream::~RandomStream() {
  for (auto& [generator, state] : saved_) {
    const std::lock_guard lock(generator.mutex());
    generator.set_state(state);
  }
}

}  // namespace lockstep::parallel
