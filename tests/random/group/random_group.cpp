// Random programs for Group on every transport, against a scalar reference.
//
//   random_group [--seed N] [--count PROGRAMS] [--minutes M] [--backend NAME] [--ranks N] [--hosts
//   0,0,1]
//                [--program SEED] [--world N] [--deadline SECONDS] [--keep-going] [--in-threads]
//
// Prints a line for each backend and exits 0 when all went well. A failure prints how to repeat it,
// and the smallest program that fails.
#include <fmt/format.h>

#include <map>
#include <sstream>

#include "random/common/dice.h"
#include "random/group/worlds.h"

namespace lockstep::random_group {
namespace {

using std::chrono::milliseconds;
using std::chrono::steady_clock;

struct Asked {
  uint64_t seed = 1;
  int64_t count = 350;
  std::optional<double> minutes;
  std::string backend;
  std::optional<int> ranks;
  std::vector<int> hosts;
  std::optional<uint64_t> program;
  std::optional<int64_t> world;  // of those that the seed gives, this one alone
  milliseconds deadline = std::chrono::seconds(60);
  bool keep_going = false, in_threads = false;
  bool show = false;
};

// Programs that share a world: starting one costs as much as some ten of them.
constexpr int64_t kBatch = 25;

Asked parse(int argc, char** argv) {
  Asked asked;
  for (int i = 1; i < argc; ++i) {
    const std::string name = argv[i];
    const std::map<std::string, bool*> flags{{"--keep-going", &asked.keep_going},
                                             {"--show", &asked.show},
                                             {"--in-threads", &asked.in_threads}};
    if (const auto flag = flags.find(name); flag != flags.end()) {
      *flag->second = true;
      continue;
    }
    if (i + 1 == argc) throw std::runtime_error(name + " needs a value");
    const std::string value = argv[++i];
    if (name == "--seed")
      asked.seed = std::stoull(value);
    else if (name == "--count")
      asked.count = std::stoll(value);
    else if (name == "--minutes")
      asked.minutes = std::stod(value);
    else if (name == "--backend")
      asked.backend = value;
    else if (name == "--ranks")
      asked.ranks = std::stoi(value);
    else if (name == "--program")
      asked.program = std::stoull(value);
    else if (name == "--world")
      asked.world = std::stoll(value);
    else if (name == "--deadline")
      asked.deadline = milliseconds(1000 * std::stoll(value));
    else if (name == "--hosts") {
      std::istringstream list(value);
      for (std::string host; std::getline(list, host, ',');) asked.hosts.push_back(std::stoi(host));
    } else {
      throw std::runtime_error("unknown option " + name);
    }
  }
  return asked;
}

// In turns, so that a short run has all of them.
Setting setting_of(const Asked& asked, int64_t batch, Dice& dice) {
#ifdef LOCKSTEP_RANDOM_DEVICE
  static const std::vector<std::string> kBackends = {"nccl"};
#else
  static const std::vector<std::string> kBackends = {
      "shm", "gloo",          "host-then-net", "shm",  "host-then-net", "gloo",
      "shm", "host-then-net", "python",        "solo", "tcp",           "tcp"};
#endif
  Setting setting{.backend =
                      asked.backend.empty() ? kBackends[batch % kBackends.size()] : asked.backend};
  const int least = setting.backend == "host-then-net" ? 3 : 2;
  // Few ranks often, since they are quick; up to seven.
  setting.ranks = static_cast<int>(least + std::min(dice.below(8 - least), dice.below(8 - least)));
  if (setting.backend == "solo") setting.ranks = 1;
  setting.ranks = asked.ranks.value_or(setting.ranks);
  setting.hosts = asked.hosts;
  setting.in_threads = setting.traits().splits && (asked.in_threads || dice.one_in(4));
  if (setting.backend != "host-then-net" || !setting.hosts.empty()) return setting;
  const int64_t hosts = 2 + dice.below(std::min(2, setting.ranks - 2));
  for (int rank = 0; rank < setting.ranks; ++rank) {
    setting.hosts.push_back(static_cast<int>(rank < hosts ? rank : dice.below(hosts)));
  }
  dice.shuffle(setting.hosts);
  return setting;
}

Program program_of(const Setting& setting, uint64_t seed) {
  Program program = generate(seed, setting.ranks, setting.traits());
  program.hosts = setting.hosts;
  if (const auto fault = fault_in(program)) {
    throw std::logic_error(
        fmt::format("seed {} gives no program: {}\n{}", seed, *fault, text_of(program)));
  }
  return program;
}

void report(const Asked& asked, int64_t world, const Setting& setting,
            const std::vector<Program>& programs, const Failure& failure) {
  const Program& program = programs[failure.program];
  fmt::print("\nFAILED: random_group {} --program {}, or with its world: --seed {} --world {}\n{}",
             setting.text(), program.seed, asked.seed, world, failure.text);
  std::fflush(stdout);
  const auto shrunk = shrink(setting, program, asked.deadline, std::chrono::minutes(3));
  if (shrunk) {
    fmt::print("the smallest program that fails ({} attempts):\n{}{}\n", shrunk->attempts,
               text_of(shrunk->program), shrunk->failure.text);
    return;
  }
  fmt::print(
      "it does not fail alone; {} programs ran before it in the same world. The program:\n{}\n",
      failure.program, text_of(program));
}

int main(int argc, char** argv) {
  const Asked asked = parse(argc, argv);
  const auto start = steady_clock::now();
  const auto end = start + std::chrono::duration_cast<steady_clock::duration>(
                               std::chrono::duration<double>(60 * asked.minutes.value_or(0)));
  std::map<std::string, int64_t> passed;
  int64_t done = 0, failures = 0;
  const auto more = [&] { return asked.minutes ? steady_clock::now() < end : done < asked.count; };
  for (int64_t batch = asked.world.value_or(0); more(); ++batch) {
    Dice dice(mixed(asked.seed, batch));
    const Setting setting = setting_of(asked, batch, dice);
    std::vector<Program> programs;
    const int64_t left = asked.minutes ? kBatch : std::min(kBatch, asked.count - done);
    for (int64_t i = 0; i < (asked.program ? 1 : left); ++i) {
      programs.push_back(program_of(setting, asked.program.value_or(dice.next())));
      if (asked.show) fmt::print("seed {}\n{}\n", programs.back().seed, text_of(programs.back()));
    }
    const auto failure = run_in_world(setting, programs, asked.deadline);
    if (failure) {
      ++failures;
      report(asked, batch, setting, programs, *failure);
      if (!asked.keep_going) return 1;
    }
    const int64_t ran =
        failure ? static_cast<int64_t>(failure->program) : static_cast<int64_t>(programs.size());
    passed[setting.backend] += ran;
    done += static_cast<int64_t>(programs.size());
    if (asked.program || asked.world) break;
  }
  const double seconds = std::chrono::duration<double>(steady_clock::now() - start).count();
  for (const auto& [backend, count] : passed) fmt::print("{}: {} programs\n", backend, count);
  fmt::print("seed {}: {} failures in {:.1f} s\n", asked.seed, failures, seconds);
  return failures > 0 || done == 0 ? 1 : 0;
}

}  // namespace
}  // namespace lockstep::random_group

int main(int argc, char** argv) {
  try {
    return lockstep::random_group::main(argc, argv);
  } catch (const std::exception& error) {
    fmt::print(stderr, "random_group: {}\n", error.what());
    return 2;
  }
}
