#include "launch/job/program.h"

#include <elf.h>
#include <fcntl.h>
#include <fmt/format.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <iterator>
#include <sstream>
#include <string_view>

#include "launch/job/run.h"
#include "lockstep/core/environment.h"

namespace lockstep::launch {
namespace {

constexpr int kNotFound = 127, kNotExecutable = 126;

[[noreturn]] void refuse(const std::string& name, std::string_view reason, int exit_code) {
  throw StartError(fmt::format("[run] cannot start '{}': {}", name, reason), exit_code);
}

// 0, or the errno that execve() would give for the file itself.
int obstacle(const std::string& path) {
  struct stat status;
  if (stat(path.c_str(), &status) != 0) return errno;
  if (S_ISDIR(status.st_mode)) return EISDIR;
  if (!S_ISREG(status.st_mode)) return EACCES;
  return access(path.c_str(), X_OK) == 0 ? 0 : EACCES;
}

std::string first_bytes(const std::string& path) {
  std::string bytes(256, '\0');
  std::ifstream file(path, std::ios::binary);
  file.read(bytes.data(), static_cast<std::streamsize>(bytes.size()));
  bytes.resize(static_cast<size_t>(file.gcount()));
  return bytes;
}

// The words of a #! line: an interpreter, and what it is given.
std::vector<std::string> interpreter_words(const std::string& path) {
  const std::string bytes = first_bytes(path);
  if (!bytes.starts_with("#!")) return {};
  std::istringstream line(bytes.substr(2, bytes.find('\n') - 2));
  return {std::istream_iterator<std::string>(line), {}};
}

// The interpreter of a #! line; empty when there is none.
std::string interpreter_of(const std::string& path) {
  const auto words = interpreter_words(path);
  return words.empty() ? "" : words.front();
}

// Whether the #! line ends as on Windows: the kernel takes the carriage return for a part of the
// interpreter's name.
bool has_windows_line_end(const std::string& path) {
  const std::string bytes = first_bytes(path);
  const size_t end = bytes.find('\n');
  return bytes.starts_with("#!") && end != bytes.npos && bytes[end - 1] == '\r';
}

// Whether that is what Python's interpreters are called: python, /usr/bin/python3.11, python3.13t.
bool is_python(std::string_view word) {
  word.remove_prefix(word.find_last_of('/') + 1);
  constexpr std::string_view kName = "python";
  if (!word.starts_with(kName)) return false;
  const std::string_view version = word.substr(kName.size());
  const size_t end = version.find_first_not_of("0123456789.");
  return end == version.npos || version.substr(end) == "t" || version.substr(end) == "d";
}

// A script that names no interpreter: the kernel does not run it, and the shell would take it for
// one of its own.
void refuse_python(const std::string& path) {
  struct stat status;
  const bool is_file = stat(path.c_str(), &status) == 0 && S_ISREG(status.st_mode);
  if (!is_file || !path.ends_with(".py") || !interpreter_of(path).empty()) return;
  refuse(path, fmt::format("it is a Python script: write python3 {}", path), kNotExecutable);
}

std::string search_path(const std::string& name) {
  const char* variable = std::getenv("PATH");
  const std::string path = variable ? variable : "/bin:/usr/bin";
  std::string refused;
  for (size_t begin = 0; begin <= path.size();) {
    const size_t end = std::min(path.find(':', begin), path.size());
    const std::string folder = path.substr(begin, end - begin);
    const std::string candidate = (folder.empty() ? "." : folder) + "/" + name;
    const int error = obstacle(candidate);
    if (error == 0) return candidate;
    // A folder that this user may not search has none, as for a shell.
    struct stat status;
    const bool is_there = stat(candidate.c_str(), &status) == 0;
    if (error == EACCES && is_there && refused.empty()) refused = candidate;
    begin = end + 1;
  }
  if (!refused.empty()) refuse_program(refused, EACCES);
  refuse_python(name);  // torchrun takes one of this folder
  const bool here = obstacle("./" + name) == 0;
  refuse(name,
         here ? fmt::format("it is not in PATH; for the one in this folder say ./{}", name)
              : "no such program in PATH; check the spelling, or give its path",
         kNotFound);
}

}  // namespace

std::string find_program(const std::string& name) {
  if (name.empty()) refuse(name, "the name is empty", kNotFound);
  const bool is_path = name.find('/') != std::string::npos;
  const std::string path = is_path ? name : search_path(name);
  refuse_python(path);
  if (const int error = obstacle(path)) refuse_program(path, error);
  const std::string interpreter = interpreter_of(path);
  if (!interpreter.empty() && obstacle(interpreter) != 0) refuse_program(path, ENOENT);
  return path;
}

void refuse_program(const std::string& path, int error) {
  const std::string interpreter = interpreter_of(path);
  struct stat status;
  if (error == ENOENT && stat(path.c_str(), &status) == 0) {
    if (has_windows_line_end(path) && obstacle(interpreter) == 0) {
      refuse(path, fmt::format("it has Windows line ends: sed -i 's/\\r$//' {}", path),
             kNotExecutable);
    }
    refuse(path,
           interpreter.empty()
               ? "the file is there, but the loader it was linked for is not on this machine"
               : fmt::format("its first line asks for '{}', which cannot be run; correct the line "
                             "or install that interpreter",
                             interpreter),
           kNotExecutable);
  }
  if (error == EISDIR) refuse(path, "it is a directory; name the program in it", kNotExecutable);
  if (error == EACCES) {
    refuse(path, fmt::format("permission denied; if it is a program: chmod +x {}", path),
           kNotExecutable);
  }
  if (error == ENOEXEC) {
    refuse(path, "it was built for another kind of machine, or is damaged", kNotExecutable);
  }
  refuse(path, std::strerror(error),
         error == ENOENT || error == ENOTDIR ? kNotFound : kNotExecutable);
}

bool is_plain_script(const char* path) noexcept {
  const int before = errno;
  std::array<char, 256> bytes;
  const int file = open(path, O_RDONLY | O_CLOEXEC);
  const ssize_t got = file < 0 ? 0 : read(file, bytes.data(), bytes.size());
  if (file >= 0) close(file);
  errno = before;
  const std::string_view text(bytes.data(), static_cast<size_t>(std::max<ssize_t>(0, got)));
  return !text.starts_with(ELFMAG) && text.find('\0') == text.npos;
}

bool binds_its_port(const std::string& path, const std::vector<std::string>& command) {
  if (env_int("LOCKSTEP_PYTHON_PEERS", 0, 1)) return has_python_peers();
  const auto interpreter = interpreter_words(path);
  return std::any_of(command.begin(), command.end(), is_python) ||
         std::any_of(interpreter.begin(), interpreter.end(), is_python);
}

}  // namespace lockstep::launch
