// Splits a list of tasks among the ranks, works on them, and gathers the results on rank 0. Task i
// counts the primes from 10,000 i to 10,000 (i + 1).
//   lockstep run --nproc-per-node 3 tasks --tasks 10 --remainder last
#include <lockstep/lockstep.h>
#include <torch/torch.h>

#include <cstdio>
#include <map>

#include "program.h"

namespace {

using lockstep::Range;
using lockstep::Remainder;
using lockstep::Shard;
using lockstep::World;

const std::map<std::string, Remainder> kRemainders = {
    {"first", Remainder::First}, {"last", Remainder::Last}, {"spread", Remainder::Spread}};

int64_t primes_in(int64_t begin, int64_t end) {
  int64_t count = 0;
  for (int64_t n = std::max<int64_t>(begin, 2); n < end; ++n) {
    bool prime = true;
    for (int64_t d = 2; d * d <= n && prime; ++d) prime = n % d != 0;
    count += prime;
  }
  return count;
}

void run(const World& world, int64_t tasks, Remainder remainder) {
  const auto part = [&](int rank) { return Shard{rank, world.size()}.of(tasks, remainder); };

  const Range mine = part(world.rank());
  torch::Tensor results = torch::empty({mine.size()}, torch::kLong);
  for (int64_t task = mine.begin; task < mine.end; ++task) {
    results[task - mine.begin] = primes_in(10'000 * task, 10'000 * (task + 1));
  }

  // Ranks have different numbers of results; rank 0 knows how many each has.
  std::vector<torch::Tensor> all;
  if (world.is_main()) {
    for (int r = 0; r < world.size(); ++r)
      all.push_back(torch::empty({part(r).size()}, torch::kLong));
  }
  world.group().gather(all, results).wait();
  if (!world.is_main()) return;

  for (int r = 0; r < world.size(); ++r) {
    std::printf("rank %d: %ld tasks from %ld:", r, part(r).size(), part(r).begin);
    for (int64_t i = 0; i < all[r].size(0); ++i) std::printf(" %ld", all[r][i].item<int64_t>());
    std::printf("\n");
  }
  std::printf("%ld tasks, %ld primes below %ld\n", tasks, torch::cat(all).sum().item<int64_t>(),
              10'000 * tasks);
}

}  // namespace

int main(int argc, char** argv) {
  CLI::App app("Splits tasks among ranks");
  int64_t tasks = 10;
  Remainder remainder = Remainder::Spread;
  app.add_option("--tasks", tasks)->check(CLI::Range(1, 1'000'000))->capture_default_str();
  app.add_option("--remainder", remainder,
                 "who gets one task more: first, last or spread (default)")
      ->transform(CLI::CheckedTransformer(kRemainders).description(""));
  return example::run(app, argc, argv, [&] { run(World::from_env(), tasks, remainder); });
}
