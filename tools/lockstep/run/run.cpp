#include "run/run.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstdio>
#include <string_view>

#include "core/number.h"
#include "flags.h"
#include "lockstep/core/environment.h"

namespace lockstep::tool {
namespace {

constexpr const char* kFooter =
    R"(The ranks find torchrun's variables in their environment. Their output lines are tagged by rank; the first
failure ends the job, or restarts it, and is reported; nothing is left behind. Flags of torchrun are taken in
both spellings (--nproc_per_node) and from PET_... variables; docs/launching.md lists them all.

On several hosts start one launcher on each. They prove to each other that they belong together by a
secret that LOCKSTEP_TOKEN_FILE names on each host: openssl rand -hex 32 > job.token; chmod 600 job.token.

Exit status: 0; the first failing rank's own; 128 + the signal that killed it, or stopped the job;
75 after a save on request (SIGUSR1): start the job again to go on;
127 and 126 when the program is not there or cannot be executed; 2 for a wrong flag.

  lockstep run --nproc-per-node 4 ./mnist --epochs 2
  lockstep run --nnodes 2 --nproc-per-node 4 --rdzv-endpoint node1:29400 ./mnist
)";

// "0,2,5"
std::vector<int> numbers_of(std::string_view flag, std::string_view text) {
  std::vector<int> numbers;
  for (size_t begin = 0; !text.empty() && begin <= text.size();) {
    const size_t end = std::min(text.find(',', begin), text.size());
    const auto value = whole_number_from<int>(text.substr(begin, end - begin));
    if (!value || *value < 0) {
      throw ConfigError(fmt::format("[run] {} '{}': give local ranks, such as 0,2,5", flag, text));
    }
    numbers.push_back(*value);
    begin = end + 1;
  }
  return numbers;
}

// torchrun's lists of texts, in which two commas are one of a text.
std::vector<std::string> texts_of(const std::string& list) {
  std::vector<std::string> texts(1);
  for (size_t i = 0; i < list.size(); ++i) {
    const bool is_double = list.compare(i, 2, ",,") == 0;
    if (list[i] == ',' && !is_double) {
      texts.emplace_back();
    } else {
      texts.back() += list[i];
    }
    i += is_double ? 1 : 0;
  }
  std::erase(texts, "");  // which every line has
  return texts;
}

constexpr int kMostRestarts = 1'000'000;
constexpr double kLongestGrace = 86400;

// torchrun's word for --bind.
std::string bind_of(const std::string& numa) {
  if (numa.empty()) return "";
  if (numa == "exclusive") return "cores";
  if (numa == "node") return "numa";
  throw ConfigError(fmt::format(
      "[run] --numa-binding {} (or PET_NUMA_BINDING) is not supported: ranks are bound to "
      "NUMA nodes or to cores (what works: node, exclusive)",
      numa));
}

[[noreturn]] void refuse_both(const char* one, const char* other) {
  throw ConfigError(fmt::format(
      "[run] {} and {} say different things about the same: give one of them", one, other));
}

}  // namespace

template <class Value>
CLI::Option* RunCommand::option(const std::string& name, Value& value, const char* type,
                                const char* description) {
  return command_.add_option(both_spellings(name), value, description)
      ->envname(variable_of(name))
      ->type_name(type);
}

void RunCommand::flag(const std::string& name, bool& value, const char* description) {
  command_.add_flag(both_spellings(name), value, description)->envname(variable_of(name));
}

RunCommand::RunCommand(CLI::App& program)
    : RunCommand(program, {.name = "run",
                           .description = "Start the ranks of a job on this host",
                           .usage = "lockstep run [FLAGS] PROGRAM [ARGS]",
                           .footer = kFooter}) {}

RunCommand::RunCommand(CLI::App& program, const CommandText& text)
    : command_(*program.add_subcommand(text.name, text.description)) {
  command_.formatter(flag_formatter(text.usage));
  command_.footer(text.footer);
  // As argparse has it, which torchrun parses with; take_program() says so.
  command_.option_defaults()->multi_option_policy(CLI::MultiOptionPolicy::TakeLast);
  add_job_flags();
  rendezvous_.add_to(command_);
  add_output_flags();
  add_accepted_flags();
  add_limited_flags(command_);
}

void RunCommand::add_job_flags() {
  option("--nproc-per-node", ranks_, "N",
         "Ranks to start (1); cpu: one per core; gpu: one per GPU;\nauto: gpu where there are any, "
         "otherwise cpu");
  option("--max-restarts", options_.max_restarts, "N",
         "Start all ranks again, at most so often, after one has failed (0)")
      ->check(whole_number(0, kMostRestarts));
  option("--master-port", port_, "PORT",
         "Where rank 0 listens, on loopback only (a free port); with\n--master-addr, where the "
         "launchers meet (29500)")
      ->check(whole_number(0, 65535));
  option("--shutdown-timeout", shutdown_, "SECONDS", "The same as --grace")
      ->check(seconds(kLongestGrace))
      ->group(kHidden);
  option(
      "--grace", grace_, "SECONDS",
      "From asking ranks to stop until they are killed\n(1.5 after a failure, 10 after a signal)")
      ->check(seconds(kLongestGrace));
  option("--rdzv-id", options_.run_id, "TEXT",
         "Name of the job: TORCHELASTIC_RUN_ID (random on one host, none on several)");
  option("--role", options_.role, "TEXT", "Name of the ranks' role: ROLE_NAME (default)");
  option("--bind", bind_, "HOW",
         "none; cores: each rank gets an equal part of them for itself; numa: those of\none NUMA "
         "node (--numa-binding exclusive and node mean the same)")
      ->check(one_of({"none", "cores", "numa"}));
  option("--numa-binding", numa_, "HOW", "")->group(kHidden);
  option("--memory-allocator", allocator_, "NAME",
         "system, tcmalloc, jemalloc, or a library's path: what the ranks get memory from;\nit is "
         "loaded before any other library (LD_PRELOAD)");
  accelerate_.add_to(command_);
  flag("-v,--verbose", options_.verbose,
       "Say how the start proceeds, here and on the ranks (LOCKSTEP_LOG=info)");
  flag("--dry-run", dry_run_, "Show what would be started, and start nothing");
  flag("--print-env", print_env_, "Show the variables of each rank, and start nothing");
}

void RunCommand::add_output_flags() {
  option("--log-dir", options_.log_dir, "FOLDER",
         "Keep files of the job here: error files, the failure page, and what\n--redirects and "
         "--tee ask for");
  option("-r,--redirects", redirects_, "WHICH",
         "Output to files instead of here: 0 none, 1 stdout, 2 stderr, 3 both,\nor for some local "
         "ranks, such as 0:3,1:1");
  option("-t,--tee", tee_, "WHICH", "Output to files as well as here");
  option("--local-ranks-filter", shown_, "RANKS", "Show the output of these local ranks only: 0,2");
  option("--duplicate-stdout-filters", out_filters_, "TEXTS",
         "Also write lines of stdout that hold one of these texts (loss,accuracy) to one\nfile, "
         "filtered_stdout.log in the attempt's folder");
  option("--duplicate-stderr-filters", err_filters_, "TEXTS",
         "The same of stderr, to filtered_stderr.log");
  option(
      "--log-line-prefix-template", options_.line_prefix, "TEXT",
      "Before each line: ${role_name}, ${local_rank}, ${rank}, ${hostname}\n('[rank ${rank}] ')");
}

void RunCommand::add_accepted_flags() {
  flag("--no-python", accepted_, "Accepted: the program is always run directly");
  flag("--use-env", accepted_, "Accepted: ranks find LOCAL_RANK in their environment");
  option("--monitor-interval", accepted_number_, "SECONDS",
         "Accepted: the end of a rank is known at once")
      ->check(some_seconds(kLongestGrace));
}

std::vector<std::string> RunCommand::take_program(const std::vector<std::string>& words) {
  auto word = words.begin();
  for (; word != words.end() && word->size() > 1 && word->starts_with('-') && *word != "--";
       ++word) {
    bool value_follows = false;
    const bool is_last = word + 1 == words.end();
    take_flag(*word, is_last ? "" : word[1], value_follows);
    if (value_follows && !is_last) ++word;
  }
  const auto program = word != words.end() && *word == "--" ? word + 1 : word;
  options_.command.assign(program, words.end());
  return {words.begin(), word};
}

const CLI::Option* RunCommand::take_flag(const std::string& word, const std::string& next,
                                         bool& value_follows) {
  const CLI::Option* option = option_of(command_, word, value_follows);
  if (option == nullptr) refuse_flag(command_, word, next);
  const bool is_end = next == "--";
  const bool is_flag = next.starts_with("--") ? knows(next) : next.size() == 2 && knows(next);
  if (value_follows && (is_end || is_flag)) {
    throw ConfigError(fmt::format(
        "[{0}] {1} has no value: {2} follows, which {3} ({1}={2} where that is meant)",
        command_.get_name(), word, next, is_end ? "ends the flags" : "is a flag itself"));
  }
  ++given_[option];
  return option;
}

void RunCommand::apply_accelerate() {
  if (std::exchange(is_accelerate_applied_, true)) return;
  accelerate_.apply(command_, options_,
                    [this](const std::string& flag) { return is_given(flag.c_str()); });
}

void RunCommand::give(const std::string& flag, const std::string& value) {
  CLI::Option* option = command_.get_option(flag);
  if (option->count() > 0) return;
  option->add_result(value);
  option->run_callback();
}

void RunCommand::replace(const std::string& flag, const std::string& value) {
  if (is_said(flag)) return;
  CLI::Option* option = command_.get_option(flag);
  option->clear();
  option->add_result(value);
  option->run_callback();
}

std::string RunCommand::value_of(const std::string& flag) const {
  const CLI::Option* option = command_.get_option(flag);
  return option->count() == 0 ? "" : option->results().back();
}

std::string RunCommand::said_by(const std::string& flag) const {
  if (is_given(flag.c_str())) return flag;
  const char* const accelerates = accelerates_name(flag);
  return accelerates != nullptr && is_given(accelerates) ? accelerates : "";
}

std::string RunCommand::origin_of(const std::string& flag) const {
  if (is_said(flag)) return "flag " + said_by(flag);
  const std::string variable = variable_of(flag);
  const auto text = env_text(variable.c_str());
  return text ? fmt::format("environment {}={}", variable, *text) : "accelerate";
}

std::vector<std::string> RunCommand::given_flags() const {
  std::vector<std::string> flags;
  for (const auto& [option, times] : given_) flags.push_back("--" + option->get_lnames().front());
  return flags;
}

void RunCommand::choose_grace() {
  const bool own = is_given("--grace"), torchruns = is_given("--shutdown-timeout");
  if (own && torchruns && grace_ != shutdown_) refuse_both("--grace", "--shutdown-timeout");
  const double chosen = torchruns && !own ? shutdown_ : grace_ >= 0 ? grace_ : shutdown_;
  if (chosen < 0) return;
  options_.grace = std::chrono::milliseconds(static_cast<int64_t>(chosen * 1000));
}

void RunCommand::choose_binding() {
  const std::string torchruns = bind_of(numa_);
  if (is_given("--bind") && is_given("--numa-binding") && bind_ != torchruns) {
    refuse_both("--bind", "--numa-binding");
  }
  const bool numa = bind_.empty() || (is_given("--numa-binding") && !is_given("--bind"));
  const std::string& chosen = numa ? torchruns : bind_;
  options_.binding = chosen == "cores"  ? launch::Binding::Cores
                     : chosen == "numa" ? launch::Binding::Numa
                                        : launch::Binding::None;
}

bool RunCommand::knows(const std::string& word) const {
  bool value_follows = false;
  return option_of(command_, word, value_follows) != nullptr;
}

int RunCommand::carry_out() {
  for (const auto& [option, times] : given_) {
    const bool takes_last = option->get_multi_option_policy() == CLI::MultiOptionPolicy::TakeLast;
    if (times < 2 || option->get_expected_max() == 0 || !takes_last) continue;
    fmt::print(stderr, "lockstep: {} is given {} times; the last one counts: {}\n",
               "--" + option->get_lnames().front(), times, option->results().back());
  }
  refuse_limited_flags(command_);
  apply_accelerate();
  if (options_.verbose) options_.environment.emplace("LOCKSTEP_LOG", "info");
  if (rendezvous_.tls()) {
    if (env_text("LOCKSTEP_TLS").value_or("1") != "1") refuse_both("--tls", "LOCKSTEP_TLS");
    options_.environment.emplace("LOCKSTEP_TLS", "1");
  }
  choose_binding();
  choose_grace();
  if (allocator_ != "system") options_.preload = launch::find_allocator(allocator_);
  options_.ranks = launch::count_ranks(ranks_);
  const std::string remark = launch::remark_on_cores(ranks_, options_.ranks);
  if (!remark.empty()) fmt::print(stderr, "lockstep: {}\n", remark);
  options_.redirects = launch::StreamChoice::parse("--redirects", redirects_);
  options_.tee = launch::StreamChoice::parse("--tee", tee_);
  options_.out_filters = texts_of(out_filters_);
  options_.err_filters = texts_of(err_filters_);
  options_.shown_ranks = numbers_of("--local-ranks-filter", shown_);
  // torchrun's word for no files.
  if (options_.log_dir == "/dev/null") options_.log_dir.clear();
  if (port_ > 0) options_.master_port = static_cast<uint16_t>(port_);
  const auto rendezvous = rendezvous_.chosen(port_);
  if (print_env_ && rendezvous) {
    throw ConfigError(
        "[run] --print-env: with several hosts a rank's variables are known when the launchers "
        "have met; leave --nnodes out to see those of one host");
  }
  if (print_env_) fmt::print("{}", launch::describe_environment(options_));
  if (dry_run_) {
    fmt::print("{}\n", rendezvous ? launch::describe_on_hosts(options_, *rendezvous)
                                  : launch::describe(options_));
  }
  if (print_env_ || dry_run_) return 0;
  return rendezvous ? launch::run_on_hosts(options_, *rendezvous) : launch::run(options_);
}

}  // namespace lockstep::tool
