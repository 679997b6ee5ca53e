#include "random/training/shrink.h"

#include <algorithm>

#include "random/training/features.h"

namespace lockstep::test::training {
namespace {

// Smaller programs, the smallest first.
std::vector<Program> smaller(const Program& program) {
  std::vector<Program> all;
  for (size_t i = 0; i < program.features.size(); ++i) {
    all.push_back(program);
    all.back().features.erase(all.back().features.begin() + static_cast<std::ptrdiff_t>(i));
  }
  for (size_t i = 0; i < program.layers.size(); ++i) {
    all.push_back(program);
    all.back().layers.erase(all.back().layers.begin() + static_cast<std::ptrdiff_t>(i));
  }
  if (program.steps > 1) {
    all.push_back(program);
    --all.back().steps;
  }
  if (program.ranks > 1) {
    all.push_back(program);
    --all.back().ranks;
    if (all.back().ranks == 1) all.back().backend = "solo";
    if (!all.back().hosts.empty()) all.back().hosts.pop_back();
    const auto& hosts = all.back().hosts;
    const bool on_one = !hosts.empty() && std::ranges::count(hosts, hosts[0]) == std::ssize(hosts);
    const bool on_one_each =
        std::ranges::all_of(hosts, [&](int host) { return std::ranges::count(hosts, host) == 1; });
    // host-then-net is refused where there is nothing for it to do.
    if (on_one || (on_one_each && all.back().backend == "host-then-net")) all.pop_back();
  }
  if (program.ranks > 1 && program.backend != "shm") {
    all.push_back(program);
    all.back().backend = "shm";
    all.back().hosts.clear();
  }
  if (program.optimizer.name != "plain_sgd") {
    all.push_back(program);
    all.back().optimizer = {"plain_sgd", 0};
  }
  for (size_t i = 0; i < program.layers.size(); ++i) {
    if (program.layers[i].name == "linear") continue;
    all.push_back(program);
    all.back().layers[i].name = "linear";
  }
  // Some features need others, or layers.
  std::erase_if(all, [](const Program& each) {
    return !std::ranges::all_of(each.features, [&](const Part& part) {
      const auto kind = std::ranges::find(all_features(), part.name, &FeatureKind::name);
      return kind->applies(each);
    });
  });
  return all;
}

}  // namespace

Program shrink(Program program, const std::function<bool(const Program&)>& fails, int most) {
  for (bool smaller_found = true; smaller_found;) {
    smaller_found = false;
    for (const auto& candidate : smaller(program)) {
      if (most-- <= 0) return program;
      if (!fails(candidate)) continue;
      program = candidate;
      smaller_found = true;
      break;
    }
  }
  return program;
}

}  // namespace lockstep::test::training
