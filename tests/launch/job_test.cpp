// The support of this folder's tests, and main(): the test program is also a rank, so that a
// launched process can use the library.
#include "launch/job.h"

#include <arpa/inet.h>
#include <fcntl.h>
#include <fmt/format.h>
#include <gtest/gtest.h>
#include <linux/capability.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <netinet/in.h>
#include <poll.h>
#include <sys/ioctl.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <csignal>
#include <cstddef>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <string>
#include <thread>

#include "core/control.h"
#include "core/files/fd.h"
#include "core/flight/segment.h"
#include "core/process/stat.h"
#include "launch/process/orphan_reaper.h"
#include "lockstep/core/environment.h"
#include "lockstep/core/error.h"
#include "lockstep/core/preemption.h"

namespace lockstep::launch::testing {
namespace {

void limit(__rlimit_resource what, long soft, long hard) {
  const rlimit both{static_cast<rlim_t>(soft), static_cast<rlim_t>(hard)};
  setrlimit(what, &both);
}

void refuse(const std::vector<int>& calls, int error) {
  std::vector<sock_filter> filter = {
      BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(seccomp_data, nr))};
  for (const int call : calls) {
    filter.push_back(BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, static_cast<uint32_t>(call), 0, 1));
    filter.push_back(BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | static_cast<uint32_t>(error)));
  }
  filter.push_back(BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW));
  const sock_fprog program{static_cast<unsigned short>(filter.size()), filter.data()};
  prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0);
  if (prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &program) != 0) _exit(98);
}

// Ends by itself some time.
void leave_a_child(const std::string& holding) {
  const int held = open(holding.c_str(), O_WRONLY);
  if (fork() == 0) {
    for (const int fd : {0, 1, 2}) close(fd);
    execlp("sleep", "sleep", "30", nullptr);
    _exit(99);
  }
  close(held);
}

}  // namespace

Job::Job(std::vector<std::string> args, Settings settings) {
  std::array<int, 2> in, out, err;
  for (auto* ends : {&in, &out, &err}) {
    if (pipe2(ends->data(), O_CLOEXEC) != 0) throw std::runtime_error("pipe2");
  }
  std::vector<char*> argv = {const_cast<char*>("lockstep")};
  for (auto& arg : args) argv.push_back(arg.data());
  argv.push_back(nullptr);
  pid_ = fork();
  if (pid_ == 0) {
    dup2(in[0], 0);
    dup2(out[1], 1);
    dup2(err[1], 2);
    if (settings.extra_fd >= 0) dup2(0, settings.extra_fd);
    for (const int number : settings.ignored_signals) std::signal(number, SIG_IGN);
    if (!settings.child_holds.empty()) leave_a_child(settings.child_holds);
    if (settings.most_file_bytes >= 0) {
      limit(RLIMIT_FSIZE, settings.most_file_bytes, settings.most_file_bytes);
    }
    if (settings.most_open_files >= 0) {
      limit(RLIMIT_NOFILE, settings.most_open_files, settings.most_open_files_ever);
    }
    // Root opens what it likes, unless that is taken from it.
    if (settings.is_output_anothers && fchown(1, 65534, 65534) == 0) {
      prctl(PR_CAPBSET_DROP, CAP_DAC_OVERRIDE);
    }
    for (const auto& [name, value] : settings.environment) setenv(name.c_str(), value.c_str(), 1);
    if (!settings.refused_calls.empty()) refuse(settings.refused_calls, settings.refusal);
    execv(LOCKSTEP_BINARY_DIR "/bin/lockstep", argv.data());
    _exit(99);
  }
  close(in[0]);
  close(out[1]);
  close(err[1]);
  input_ = in[1];
  output_ = out[0];
  errors_ = err[0];
}

Job::~Job() {
  if (pid_ > 0) {
    kill(pid_, SIGKILL);
    waitpid(pid_, nullptr, 0);
  }
  for (const int fd : {input_, output_, errors_}) {
    if (fd >= 0) close(fd);
  }
}

void Job::write_input(const std::string& text) {
  ASSERT_EQ(write(input_, text.data(), text.size()), static_cast<ssize_t>(text.size()));
}

void Job::close_input() {
  if (input_ >= 0) close(std::exchange(input_, -1));
}

void Job::stop_reading() { close(std::exchange(output_, -1)); }

int Job::unread_bytes() const {
  int bytes = 0;
  ioctl(output_, FIONREAD, &bytes);
  return bytes;
}

bool Job::read_some() {
  std::array<pollfd, 2> events = {{{is_unread_ ? -1 : output_, POLLIN, 0}, {errors_, POLLIN, 0}}};
  if (poll(events.data(), 2, static_cast<int>(kPatience / std::chrono::milliseconds(1))) <= 0) {
    ADD_FAILURE() << "the job says nothing and does not end; so far:\n" << out_ << err_;
    return false;
  }
  std::array<char, 1 << 16> buffer;
  for (auto& event : events) {
    if (event.revents == 0) continue;
    const ssize_t got = read(event.fd, buffer.data(), buffer.size());
    const bool is_out = event.fd == output_;
    if (got > 0) (is_out ? out_ : err_).append(buffer.data(), static_cast<size_t>(got));
    if (got <= 0) close(std::exchange(is_out ? output_ : errors_, -1));
  }
  return (output_ >= 0 && !is_unread_) || errors_ >= 0;
}

bool Job::await(const std::string& text, int count) {
  for (;;) {
    int found = 0;
    for (size_t at = 0; (at = out_.find(text, at)) != std::string::npos; at += text.size()) ++found;
    if (found >= count) return true;
    if (!read_some()) return false;
  }
}

bool Job::await_error(const std::string& text, size_t after) {
  while (err_.find(text, after) == std::string::npos) {
    if (!read_some()) return false;
  }
  return true;
}

Result Job::wait() {
  close_input();
  while (read_some()) {
  }
  int status = 0;
  waitpid(std::exchange(pid_, -1), &status, 0);
  is_unread_ = false;
  while (output_ >= 0 && read_some()) {
  }
  const auto time = std::chrono::steady_clock::now() - start_;
  return {WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status), out_, err_,
          std::chrono::duration<double>(time).count()};
}

std::vector<std::string> script_args(int ranks, const std::string& script) {
  return {"run", fmt::format("--nproc-per-node={}", ranks), "sh", "-c", script};
}

std::vector<std::string> rank_args(const std::string& mode, std::vector<std::string> flags) {
  std::vector<std::string> args = {"run", "--nproc-per-node=2"};
  args.insert(args.end(), flags.begin(), flags.end());
  args.insert(args.end(), {std::filesystem::read_symlink("/proc/self/exe"), "rank", mode});
  return args;
}

Result run_script(int ranks, const std::string& script, Settings settings) {
  return Job(script_args(ranks, script), std::move(settings)).wait();
}

std::vector<std::string> lines_of(const std::string& text) {
  std::vector<std::string> lines;
  for (size_t begin = 0; begin < text.size();) {
    const size_t end = std::min(text.find('\n', begin), text.size());
    lines.push_back(text.substr(begin, end - begin));
    begin = end + 1;
  }
  return lines;
}

TwoHosts::TwoHosts() {
  const Fd socket(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  socklen_t length = sizeof address;
  auto* generic = reinterpret_cast<sockaddr*>(&address);
  if (bind(socket.get(), generic, length) != 0 ||
      getsockname(socket.get(), generic, &length) != 0) {
    throw std::runtime_error("no free port");
  }
  port_ = ntohs(address.sin_port);
}

std::vector<std::string> TwoHosts::args(int host, std::vector<std::string> more) const {
  std::vector<std::string> args = {
      "run", "--nnodes=2", "--nproc-per-node=2", fmt::format("--rdzv-endpoint=127.0.0.1:{}", port_),
      fmt::format("--rdzv-conf=is_host={},join_timeout=600,heartbeat_timeout=10", 1 - host)};
  args.insert(args.end(), more.begin(), more.end());
  return args;
}

Settings TwoHosts::with_token(Settings settings) {
  settings.environment["LOCKSTEP_TOKEN"] = "0123456789abcdef";
  return settings;
}

Presence::Presence() {
  if (mkfifo(path_.c_str(), 0600) != 0) throw std::runtime_error("mkfifo");
  fd_ = open(path_.c_str(), O_RDONLY | O_NONBLOCK | O_CLOEXEC);
}

Presence::~Presence() { close(fd_); }

bool Presence::everybody_left(std::chrono::milliseconds limit) const {
  pollfd event = {fd_, 0, 0};  // POLLHUP alone
  return poll(&event, 1, static_cast<int>(limit.count())) == 1;
}

namespace {

// `test_launch rank watch`: spins on the epoch as a collective would, then says what it knows of
// rank 1, and fails. It says in the folder CHORUS, where there is one, that it has begun.
int watch() {
  const auto control = Control::from_env();
  if (const auto folder = env_text("CHORUS")) std::ofstream{*folder + "/watching"};
  while (control->failures() == 0) std::this_thread::yield();
  fmt::print("rank 1 {}\n", control->fate(1).value_or("runs"));
  return 1;
}

// `test_launch rank headless`: its main thread ends, and another reads until its stdin ends.
int headless() {
  std::thread([] {
    while (std::getchar() != EOF) continue;
  }).detach();
  pthread_exit(nullptr);
}

// `test_launch rank preempted`: works until it is told to save, and then ends well. `requeued`:
// asks to be started again; rank 1 ends after rank 0 and without a signal, as one that hears of it
// from that.
int preempted(bool requeued) {
  const PreemptionNotice notice;
  const bool follows = requeued && env_int("LOCAL_RANK", 0, 9) == 1;
  fmt::print("ready\n");
  std::fflush(stdout);
  while (follows ? !Control::from_env()->fate(0) : !notice.received()) usleep(1000);
  if (requeued) return kRequeueStatus;
  fmt::print("saved on SIG{}\n", sigabbrev_np(*notice.signal()));
  return 0;
}

void announce(const char* what, int64_t count) {
  flight::Operation operation{.count = count};
  std::snprintf(operation.what.data(), operation.what.size(), "%s", what);
  std::snprintf(operation.dtype.data(), operation.dtype.size(), "float32");
  const uint32_t call = flight::begin(operation);
  flight::number(call, 10 * call);
  flight::end(call);
}

[[gnu::noinline]] void wait_for_ever() {
  fmt::print("stuck\n");
  std::fflush(stdout);
  for (;;) pause();
}

// `test_launch rank stuck`: rank 0 waits in its third call for ever; the others have made two, and
// end with status 7 once there is something to read. They wait in poll(), in which ThreadSanitizer
// lets a signal through.
[[gnu::noinline]] int stuck() {
  announce("broadcast", 1);
  announce("all_reduce sum", 2);
  if (env_int("RANK", 0, 9) == 0) {
    flight::Operation third{.count = 3};
    std::snprintf(third.what.data(), third.what.size(), "barrier");
    const uint32_t call = flight::begin(third);
    flight::number(call, 30);
    const flight::Span blocked(flight::Activity::Communication, call);
    wait_for_ever();
  }
  fmt::print("stuck\n");
  std::fflush(stdout);
  const Fd gate(open(env_text("GATE")->c_str(), O_RDWR | O_CLOEXEC));
  pollfd line{.fd = gate.get(), .events = POLLIN, .revents = 0};
  while (poll(&line, 1, -1) < 0) {
  }
  return 7;
}

// `test_launch rank chorus`: rank 1 fails when all have come, which is seen in the folder CHORUS;
// the others say so in much the same words.
int chorus() {
  const auto rank = *env_int("RANK", 0, 99);
  const std::filesystem::path folder = *env_text("CHORUS");
  std::ofstream(folder / std::to_string(rank));
  if (rank == 1) {
    const auto come = [&] {
      return std::ranges::distance(std::filesystem::directory_iterator(folder));
    };
    while (come() < *env_int("WORLD_SIZE", 1, 99)) std::this_thread::yield();
    flight::report_failure("bad data in row 17");
    return 3;
  }
  const auto control = Control::from_env();
  while (!control->fate(1)) std::this_thread::yield();
  const std::string who = rank == 2 ? "rank 2 (rank 1 of its group)" : fmt::format("rank {}", rank);
  flight::report_failure(fmt::format("all_reduce #9 on {} cannot go on: rank 1 exited", who),
                         flight::Blame::Peer);
  return 1;
}

// `test_launch rank echo`: rank 1 fails, and takes its time to end; rank 0 sees it in the folder
// CHORUS, and ends before.
int echo() {
  const auto control = Control::from_env();
  const std::filesystem::path failed = std::filesystem::path(*env_text("CHORUS")) / "failed";
  if (env_int("RANK", 0, 9) == 1) {
    flight::report_failure("bad data in row 17");
    std::ofstream{failed};
    while (!control->fate(0)) std::this_thread::yield();
    return 3;
  }
  while (!std::filesystem::exists(failed)) std::this_thread::yield();
  flight::report_failure("rank 1 gave up", flight::Blame::Peer);
  return 1;
}

// Named functions for the stacks; what follows their calls keeps the compiler from leaving a frame
// out.
[[gnu::noinline]] void refuse_row(const std::string& gate) {
  if (!gate.empty()) throw Error("nobody catches this");
}

int uncaught() {
  announce("barrier", 0);
  refuse_row("nobody catches this");
  return 0;
}

// `test_launch rank kept_in`: the exception comes to a function that it cannot leave.
[[gnu::noinline]] int kept_in() noexcept {
  announce("barrier", 0);
  static const std::string gate = "nobody catches this";  // what is destroyed is unwound to
  refuse_row(gate);
  return 0;
}

[[gnu::noinline]] int read_damaged_row(volatile int* row) {
  *row = 1;
  return *row + 1;
}

// 4 KiB a call, until there is no more.
[[gnu::noinline]] int descend(int depth) {
  volatile char page[4096];
  page[0] = static_cast<char>(depth);
  return depth < 0 ? 0 : descend(depth + 1) + page[0];
}

// `test_launch rank overflow`
int overflow() {
  announce("barrier", 0);
  return descend(0);
}

// `test_launch rank reapers`: counts inner jobs' orphan reapers that show the outer one's mark.
int reapers() {
  const auto mark = OrphanReaper::kVariable + ("=" + *env_text(OrphanReaper::kVariable));
  int marked = 0, all = 0;
  for (int i = 0; i < 50; ++i) {
    const OrphanReaper reaper("inner");
    for (const auto& one : std::filesystem::directory_iterator("/proc")) {
      const auto stat = process_stat(std::atoi(one.path().filename().c_str()));
      if (!stat || stat->parent != getpid()) continue;
      ++all;
      std::ifstream file(one.path() / "environ");
      const std::string text(std::istreambuf_iterator<char>(file), {});
      marked += text.find(mark) != std::string::npos ? 1 : 0;
    }
  }
  fmt::print("{} of {} were marked\n", marked, all);
  return 0;
}

// `test_launch rank crash`: rank 1 writes to an address that is nobody's.
int crash() {
  announce("barrier", 0);
  volatile uintptr_t nowhere = 8;
  if (env_int("RANK", 0, 9) == 1) return read_damaged_row(reinterpret_cast<int*>(nowhere)) + 1;
  for (;;) pause();
}

}  // namespace
}  // namespace lockstep::launch::testing

int main(int argc, char** argv) {
  if (argc == 3 && argv[1] == std::string("rank")) {
    using namespace lockstep::launch::testing;
    const std::string mode = argv[2];
    if (mode == "watch") return watch();
    if (mode == "stuck") return stuck();
    if (mode == "chorus") return chorus();
    if (mode == "echo") return echo();
    if (mode == "overflow") return overflow();
    if (mode == "crash") return crash();
    if (mode == "uncaught") return uncaught();
    if (mode == "kept_in") return kept_in();
    if (mode == "reapers") return reapers();
    if (mode == "headless") return headless();
    if (mode == "preempted") return preempted(false);
    if (mode == "requeued") return preempted(true);
  }
  // A shell's background jobs begin with them ignored, and so would the launchers.
  for (const int number : {SIGINT, SIGQUIT}) std::signal(number, SIG_DFL);
  testing::InitGoogleTest(&argc, argv);
  return RUN_ALL_TESTS();
}
