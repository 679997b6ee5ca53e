#include "lockstep/parallel/random.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Context.h>

#include <cstdlib>
#include <mutex>

#include "core/mix.h"

namespace lockstep::parallel {
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
