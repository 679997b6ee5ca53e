// Random training programs on 1 to 5 ranks over every transport, against one process that does the
// same.
//
// random_training [--seed N] [--count N | --minutes M] [--backend NAME] [--ranks N]
//                 [--program TEXT] [--shrink N] [--list parts]
#include <fmt/format.h>

#include <chrono>
#include <iterator>
#include <map>
#include <set>
#include <sstream>

#include "random/common/options.h"
#include "random/training/features.h"
#include "random/training/shrink.h"
#include "random/training/worlds.h"

namespace lockstep::test::training {
namespace {

struct Options {
  uint64_t seed = 1;
  int count = 200;
  double minutes = 0;
  std::string backend;
  int ranks = 0;
  std::string program;
  int shrink = 60;
  std::string list;
};

Options options_from(int count, char** words) {
  Options options;
  read_options(count, words,
               {{"--seed", &options.seed},
                {"--count", &options.count},
                {"--minutes", &options.minutes},
                {"--backend", &options.backend},
                {"--ranks", &options.ranks},
                {"--program", &options.program},
                {"--list", &options.list},
                {"--shrink", &options.shrink}});
  return options;
}

// A program with its variants, and what came of each.
struct Case {
  std::vector<Program> variants;
  std::vector<Outcome> outcomes;

  // Of all ranks; with lanes they are alike, and do not depend on how many there are.
  std::string bits_of(size_t variant) const {
    const std::string& all = outcomes[variant].digest;
    if (variants[variant].lanes() == 0) return all;
    std::istringstream words(all);
    std::set<std::string> each{std::istream_iterator<std::string>(words), {}};
    return each.size() == 1 ? *each.begin() : all;
  }

  std::string error() const {
    for (size_t i = 0; i < outcomes.size(); ++i) {
      if (!outcomes[i].good) return fmt::format("variant {}: {}", i, outcomes[i].error);
    }
    for (size_t i = 1; i < outcomes.size(); ++i) {
      if (bits_of(i) != bits_of(0)) {
        return fmt::format("variant {} ({} ranks, {}) and variant 0 ({} ranks, {}) differ in bits",
                           i, variants[i].ranks, variants[i].backend, variants[0].ranks,
                           variants[0].backend);
      }
    }
    return {};
  }
};

Case case_of(const Program& program) {
  Case made{.variants = {program}, .outcomes = {}};
  made.variants.push_back(variant_of(program));
  if (program.lanes() > 0 && refusal_of(program).empty()) {
    made.variants.push_back(on_other_ranks(program));
  }
  made.outcomes.resize(made.variants.size());
  return made;
}

void run(std::vector<Case>& cases) {
  std::map<std::tuple<int, std::string, std::vector<int>>, std::vector<std::pair<size_t, size_t>>>
      worlds;
  for (size_t i = 0; i < cases.size(); ++i) {
    for (size_t j = 0; j < cases[i].variants.size(); ++j) {
      const Program& program = cases[i].variants[j];
      worlds[{program.ranks, program.backend, program.hosts}].emplace_back(i, j);
    }
  }
  for (const auto& [world, places] : worlds) {
    std::vector<Program> programs;
    for (const auto& [i, j] : places) programs.push_back(cases[i].variants[j]);
    auto outcomes = run_in_worlds(programs);
    for (size_t k = 0; k < places.size(); ++k) {
      cases[places[k].first].outcomes[places[k].second] = std::move(outcomes[k]);
    }
  }
}

std::string error_of(const Program& program) {
  std::vector<Case> one{case_of(program)};
  run(one);
  return one[0].error();
}

void report(const Case& failed, const Options& options) {
  fmt::print("FAILED {}\n  {}\n", failed.variants[0].text(), failed.error());
  if (options.shrink == 0) return;
  const auto least = shrink(
      failed.variants[0], [](const Program& program) { return !error_of(program).empty(); },
      options.shrink);
  fmt::print("  smallest: --program '{}'\n  {}\n", least.text(), error_of(least));
  std::fflush(stdout);
}

bool is_wanted(const Program& program, const Options& options) {
  return (options.backend.empty() || program.backend == options.backend) &&
         (options.ranks == 0 || program.ranks == options.ranks);
}

int run_all(const Options& options) {
  using Clock = std::chrono::steady_clock;
  const auto begin = Clock::now();
  const auto seconds = [&] { return std::chrono::duration<double>(Clock::now() - begin).count(); };
  int done = 0, failures = 0;
  uint64_t seed = options.seed;
  const auto more = [&] {
    return options.minutes > 0 ? seconds() < options.minutes * 60 : done < options.count;
  };
  while (more()) {
    std::vector<Case> cases;
    const int batch = options.minutes > 0 ? 200 : std::min(200, options.count - done);
    while (std::ssize(cases) < batch) {
      const auto program = compose(seed++);
      if (is_wanted(program, options)) cases.push_back(case_of(program));
    }
    run(cases);
    done += batch;
    for (const auto& each : cases) {
      if (each.error().empty()) continue;
      ++failures;
      report(each, options);
    }
    fmt::print("{} programs, {} failed, {:.0f} s\n", done, failures, seconds());
    std::fflush(stdout);
  }
  return failures == 0 ? 0 : 1;
}

int run_program(const Options& options) {
  std::vector<Case> one{case_of(Program::parse(options.program))};
  run(one);
  for (size_t i = 0; i < one[0].variants.size(); ++i) {
    fmt::print("{}: {} {}\n", one[0].variants[i].text(), one[0].outcomes[i].error,
               one[0].outcomes[i].digest);
  }
  fmt::print("{}\n", one[0].error().empty() ? "good" : one[0].error());
  return one[0].error().empty() ? 0 : 1;
}

// For tests/checks/combinations.py: what programs are composed of, and which pairs are never
// together.
int list_parts() {
  for (const auto& name : block_names()) fmt::print("part {}\n", name);
  for (const auto& name : optimizer_names()) fmt::print("part {}\n", name);
  for (const auto& kind : all_features()) fmt::print("part {}\n", kind.name);
  for (const auto& pair : conflicts()) fmt::print("apart {} {}\n", pair.one, pair.other);
  for (const auto& pair : open_defects()) fmt::print("apart {} {}\n", pair.one, pair.other);
  return 0;
}

}  // namespace
}  // namespace lockstep::test::training

int main(int count, char** words) {
  using namespace lockstep::test::training;
  try {
    const auto options = options_from(count, words);
    if (!options.list.empty()) return list_parts();
    return options.program.empty() ? run_all(options) : run_program(options);
  } catch (const std::exception& error) {
    fmt::print(stderr, "random_training: {}\n", error.what());
    return 2;
  }
}
