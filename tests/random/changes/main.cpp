// Random trainings that change while they run: parameters that are frozen, replaced and tied,
// groups of an optimizer that are added, and checkpoints from which other wrappers on other ranks
// go on. Each is compared with one process that does the same.
//
// random_changes [--seed N] [--count N | --minutes M] [--backend NAME] [--ranks N]
//                [--without N,N] [--shrink N]
#include <c10/util/Exception.h>
#include <fmt/format.h>
#include <unistd.h>

#include <chrono>
#include <cstdlib>
#include <filesystem>
#include <map>
#include <sstream>

#include "lockstep/core/error.h"
#include "random/changes/train.h"
#include "random/common/options.h"
#include "support/folder.h"
#include "support/spawn.h"

namespace lockstep::test::changes {
namespace {

// A program that takes longer hangs.
constexpr unsigned kSeconds = 120;

struct Options {
  uint64_t seed = 1;
  int count = 200;
  double minutes = 0;
  std::string backend;
  int ranks = 0;
  std::string without;
  int shrink = 40;
};

// What all ranks' phases end with: nothing, or the words in which it is refused.
std::string run_course(const Course& course, size_t phase, const Group& group,
                       const std::string& folder) {
  const std::string wanted = refusal_of(course, phase);
  try {
    const auto error = run_phase(course, phase, group, folder);
    if (!error.empty()) return "differs " + error;
    return wanted.empty() ? "" : "is not refused with " + wanted;
  } catch (const ConfigError& error) {
    const std::string text = error.what();
    if (wanted.empty() || text.find(wanted) == std::string::npos) {
      return fmt::format("threw {}; wanted: '{}'", text, wanted);
    }
    return {};
  } catch (const c10::Error& error) {
    // What is tied to a layer of another unit, which has no memory there.
    const std::string text = error.what_without_backtrace();
    const bool is_tied = wanted.find("Fsdp") != std::string::npos &&
                         text.find("and has no memory outside of its unit") != std::string::npos;
    return is_tied ? "" : fmt::format("threw {}; wanted: '{}'", text, wanted);
  } catch (const std::exception& error) {
    return fmt::format("threw {}; wanted: '{}'", error.what(), wanted);
  }
}

// On a rank; empty when all is well.
std::string run_program(const Program& program, World& world, const std::string& folder) {
  const Group& all = world.group();
  std::vector<bool> over(program.courses.size());
  for (size_t phase = 0; phase < program.courses[0].phases.size(); ++phase) {
    int own = -1;
    for (size_t i = 0; i < program.courses.size(); ++i) {
      const auto& ranks = program.courses[i].phases[phase].ranks;
      if (!over[i] && std::ranges::count(ranks, world.rank()) > 0) own = static_cast<int>(i);
    }
    const Group group = all.split(own + 1);
    std::string error;
    if (own >= 0) {
      error = run_course(program.courses[static_cast<size_t>(own)], phase, group,
                         fmt::format("{}/course-{}-{}", folder, program.seed, own));
      if (!error.empty()) error = fmt::format("course {}, phase {}: {}", own, phase, error);
    }
    for (const auto& each : all.all_gather_bytes(error)) {
      if (!each.empty()) return each;
    }
    for (size_t i = 0; i < program.courses.size(); ++i) {
      over[i] = over[i] || !refusal_of(program.courses[i], phase).empty();
    }
  }
  if (world.is_main()) {
    for (size_t i = 0; i < over.size(); ++i) {
      std::filesystem::remove_all(fmt::format("{}/course-{}-{}", folder, program.seed, i));
    }
  }
  return {};
}

// Of programs that need the same world, what is wrong with each.
std::vector<std::string> run_in_worlds(const std::vector<Program>& programs) {
  std::vector<std::string> errors(programs.size());
  size_t begin = 0;
  while (begin < programs.size()) {
    const Folder folder;
    const SpawnOptions options{.backend = programs[0].backend,
                               .hosts = programs[0].hosts,
                               .timeout = std::chrono::seconds(40)};
    const auto statuses = spawn(
        programs[0].ranks,
        [&](World& world) {
          for (size_t i = begin; i < programs.size(); ++i) {
            alarm(kSeconds);
            const auto place = folder / fmt::format("{}-{}", i, world.rank());
            std::string error;
            try {
              error = run_program(programs[i], world, folder.path());
            } catch (const std::exception& thrown) {
              error = fmt::format("rank {} threw {}", world.rank(), thrown.what());
            }
            write(place, error);
            if (error.starts_with("rank")) return;
          }
        },
        options);
    for (bool over = false; begin < programs.size() && !over; ++begin) {
      std::string& error = errors[begin];
      for (int rank = 0; rank < programs[0].ranks; ++rank) {
        const auto place = folder / fmt::format("{}-{}", begin, rank);
        const bool ended = std::filesystem::exists(place);
        const auto said = ended ? contents(place)
                                : fmt::format("rank {} did not end: status {}", rank,
                                              statuses[static_cast<size_t>(rank)]);
        over = over || said.starts_with("rank");
        if (error.find(said) == std::string::npos) error += said + "\n  ";
      }
    }
  }
  return errors;
}

std::vector<int> numbers_of(const std::string& text) {
  std::vector<int> all;
  std::istringstream words(text);
  for (std::string word; std::getline(words, word, ',');) all.push_back(std::stoi(word));
  return all;
}

std::string error_of(const Program& program) { return run_in_worlds({program})[0]; }

void report(const Program& failed, const std::string& error, const Options& options) {
  fmt::print("FAILED {}\n  {}\n", failed.text(), error);
  std::fflush(stdout);
  size_t changes = 0;
  for (const auto& course : failed.courses) changes += course.changes.size();
  auto without = numbers_of(options.without);
  if (!without.empty() || options.shrink == 0) return;
  const auto made = [&] { return drawn(failed.seed, options.backend, options.ranks, without); };
  for (size_t i = 0; i < changes; ++i) {
    without.push_back(static_cast<int>(i));
    if (error_of(made()).empty()) without.pop_back();
  }
  std::string list;
  for (const int number : without) list += fmt::format("{}{}", list.empty() ? "" : ",", number);
  fmt::print("  smallest: --count 1 --seed {}{}\n  {}\n  {}\n", failed.seed,
             list.empty() ? "" : " --without " + list, made().text(), error_of(made()));
  std::fflush(stdout);
}

int run_all(const Options& options) {
  using Clock = std::chrono::steady_clock;
  const auto begin = Clock::now();
  const auto seconds = [&] { return std::chrono::duration<double>(Clock::now() - begin).count(); };
  int done = 0, failures = 0, refused = 0;
  uint64_t seed = options.seed;
  const auto more = [&] {
    return options.minutes > 0 ? seconds() < options.minutes * 60 : done < options.count;
  };
  while (more()) {
    std::map<std::tuple<int, std::string, std::vector<int>>, std::vector<Program>> worlds;
    const int batch = options.minutes > 0 ? 200 : std::min(200, options.count - done);
    for (int i = 0; i < batch; ++i) {
      auto program = drawn(seed++, options.backend, options.ranks, numbers_of(options.without));
      worlds[{program.ranks, program.backend, program.hosts}].push_back(std::move(program));
    }
    for (const auto& [world, programs] : worlds) {
      const auto errors = run_in_worlds(programs);
      for (size_t i = 0; i < programs.size(); ++i) {
        for (const auto& course : programs[i].courses) {
          for (size_t phase = 0; phase < course.phases.size(); ++phase) {
            refused += !refusal_of(course, phase).empty();
          }
        }
        if (errors[i].empty()) continue;
        ++failures;
        report(programs[i], errors[i], options);
      }
    }
    done += batch;
    fmt::print("{} programs, {} phases refused, {} failed, {:.0f} s\n", done, refused, failures,
               seconds());
    std::fflush(stdout);
  }
  return failures == 0 ? 0 : 1;
}

}  // namespace
}  // namespace lockstep::test::changes

int main(int count, char** words) {
  using namespace lockstep::test::changes;
  setenv("LOCKSTEP_LOG", "error", /*overwrite=*/0);
  setvbuf(stdout, nullptr, _IOLBF, 0);
  try {
    Options options;
    lockstep::test::read_options(count, words,
                                 {{"--seed", &options.seed},
                                  {"--count", &options.count},
                                  {"--minutes", &options.minutes},
                                  {"--backend", &options.backend},
                                  {"--ranks", &options.ranks},
                                  {"--without", &options.without},
                                  {"--shrink", &options.shrink}});
    return run_all(options);
  } catch (const std::exception& error) {
    fmt::print(stderr, "random_changes: {}\n", error.what());
    return 2;
  }
}
