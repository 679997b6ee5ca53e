#include "launch/process/child.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <cstring>

#include "core/process/descriptors.h"
#include "launch/job/program.h"
#include "launch/job/run.h"
#include "launch/process/binding.h"
#include "launch/process/descriptors.h"

namespace lockstep::launch {
namespace {

struct Pipe {
  Fd read, write;
};

[[noreturn]] void refuse_files(int error) {
  throw Error(fmt::format("[run] no open file for a rank: {}; raise the limit (ulimit -n)",
                          std::strerror(error)));
}

Pipe make_pipe() {
  std::array<int, 2> ends;
  if (pipe2(ends.data(), O_CLOEXEC) != 0) refuse_files(errno);
  return {Fd(ends[0]), Fd(ends[1])};
}

// To the launcher, where the target is one.
Pipe make_pipe(const Target& target) {
  if (target.kind != Target::Piped) return {};
  Pipe pipe = make_pipe();
  fcntl(pipe.read.get(), F_SETFL, O_NONBLOCK);
  return pipe;
}

// With room for one more at the front.
std::vector<char*> pointers(const std::vector<std::string>& texts) {
  std::vector<char*> result = {nullptr};
  for (const auto& text : texts) result.push_back(const_cast<char*>(text.c_str()));
  result.push_back(nullptr);
  return result;
}

bool take_stream(const Target& target, const Pipe& pipe, int as) {
  if (target.kind == Target::Shared) return true;
  return dup2(target.kind == Target::File ? target.fd : pipe.write.get(), as) >= 0;
}

// What execve() takes, each after an empty first entry.
struct Arguments {
  std::vector<char*> command, environment;
};

// A failed start travels over `failure` as its errno; end of file is success. The launcher has
// threads: one of them may have held a lock of the allocator when this process was copied from
// it, and here nobody releases that (glibc's allocator is prepared for it, AddressSanitizer's is
// not). So nothing is allocated.
[[noreturn]] void become(const ChildSpec& spec, Arguments& arguments, const Signals& signals,
                         pid_t launcher, const Pipe& out, const Pipe& err, int failure) {
  // A session rather than only a process group: rank 0 may then read from the user's terminal,
  // which would stop a group in the background, and the terminal's Ctrl-C reaches the ranks through
  // the launcher alone, once.
  setsid();
  prctl(PR_SET_PDEATHSIG, SIGKILL);
  if (getppid() != launcher) _exit(1);  // it died before prctl() could see that
  signals.restore();
  bind_to(spec.cores);

  bool ready = true;
  if (spec.input == ChildSpec::Input::None) {
    const int null = open("/dev/null", O_RDONLY | O_CLOEXEC);
    ready = null >= 0 && dup2(null, STDIN_FILENO) >= 0;
  }
  ready = ready && take_stream(spec.out, out, STDOUT_FILENO);
  ready = ready && take_stream(spec.err, err, STDERR_FILENO);
  // Other descriptors that the launcher has inherited do not reach the ranks.
  ready = ready && close_on_exec_from(STDERR_FILENO + 1);
  for (const int fd : spec.inherited) ready = ready && fcntl(fd, F_SETFD, 0) == 0;
  restore_descriptor_limit();  // no sooner: what this process opens may lie beyond it
  if (ready) {
    char** const command = arguments.command.data();
    char** const environment = arguments.environment.data() + 1;
    execve(spec.path.c_str(), command + 1, environment);
    if (errno == ENOEXEC && is_plain_script(spec.path.c_str())) {
      command[0] = const_cast<char*>("/bin/sh");
      command[1] = const_cast<char*>(spec.path.c_str());
      execve("/bin/sh", command, environment);
    }
  }
  const int error = errno;
  [[maybe_unused]] const ssize_t sent = write(failure, &error, sizeof error);
  _exit(127);
}

}  // namespace

Child start_child(const ChildSpec& spec, const Signals& signals) {
  Pipe out = make_pipe(spec.out), err = make_pipe(spec.err);
  Pipe failure = make_pipe();
  fcntl(failure.read.get(), F_SETFL, O_NONBLOCK);
  Arguments arguments = {pointers(spec.command), pointers(spec.environment)};
  const pid_t launcher = getpid();
  const pid_t pid = fork();
  if (pid < 0) {
    throw Error(
        fmt::format("[run] no process for a rank: {}; raise the limit (ulimit -u, or a container's "
                    "of processes: pids.max of its cgroup)",
                    std::strerror(errno)));
  }
  if (pid == 0) become(spec, arguments, signals, launcher, out, err, failure.write.get());
  return {pid, std::move(out.read), std::move(err.read), std::move(failure.read)};
}

bool has_started(const Fd& starting, const std::string& path) {
  int error = 0;
  ssize_t got;
  do {
    got = read(starting.get(), &error, sizeof error);
  } while (got < 0 && errno == EINTR);
  if (got < 0) return false;
  if (got == 0) return true;
  if (error == EMFILE || error == ENFILE) refuse_files(error);  // of the child, not the program
  refuse_program(path, error);
}

}  // namespace lockstep::launch
