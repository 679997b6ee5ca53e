#include "core/files/job_file.h"

#include <cerrno>
#include <cstring>
#include <filesystem>
#include <fstream>

#include "lockstep/core/environment.h"
#include "lockstep/core/error.h"

namespace lockstep {
namespace {

std::string path_in(const std::string& folder) { return folder + "/job.txt"; }

// torchrun has a name only, and two jobs may have the same.
std::string job() {
  const auto own = env_text("LOCKSTEP_JOB_ID");
  return own ? *own : env_text("TORCHELASTIC_RUN_ID").value_or("");
}

}  // namespace

void write_job_file(const std::string& folder) {
  if (job().empty()) return;
  std::error_code error;
  std::filesystem::create_directories(folder, error);
  std::ofstream file(path_in(folder), std::ios::trunc);
  file << job() << "\n";
  file.close();
  if (!file) throw Error(path_in(folder) + " cannot be written: " + std::strerror(errno));
}

bool names_this_job(const std::string& folder) {
  std::ifstream file(path_in(folder));
  std::string last;
  return std::getline(file, last) && !last.empty() && last == job();
}

bool is_restarted_job(const std::string& folder) {
  return env_int("TORCHELASTIC_RESTART_COUNT", 0, 1 << 20).value_or(0) > 0 &&
         names_this_job(folder);
}

}  // namespace lockstep
