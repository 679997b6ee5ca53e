// The bridge's process, started again when it has died.
#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "lockstep/rl/tau2.h"
#include "rl/chat/python_json.h"
#include "rl/tau2/line_process.h"

namespace lockstep::rl {

// The program that is started: tools/tau2/lockstep_tau2.py.
extern const char* const kTau2Program;

class Tau2Bridge::Child {
 public:
  explicit Child(Tau2Options options) : options_(std::move(options)) {}

  // The answer to a request; starts the process if none runs. Throws EnvironmentError when there is
  // none (then the process is gone) or when it is an error (then it goes on).
  Json ask(Json request);

  // Starts it, if nothing runs. Throws ConfigError.
  void start();

  const std::string& version() const { return version_; }
  int64_t deaths() const { return deaths_; }
  // Which process runs: worlds of an earlier one are gone. 0: none yet.
  int64_t generation() const { return generation_; }
  bool runs() const { return process_ && process_->is_own(); }
  int64_t pid() const { return runs() ? process_->pid() : 0; }
  // A name for another world.
  std::string new_session() { return "s" + std::to_string(++sessions_); }

 private:
  Json exchange(Json request, std::chrono::milliseconds timeout);

  Tau2Options options_;
  std::unique_ptr<LineProcess> process_;
  std::string version_;
  int64_t generation_ = 0;
  int64_t deaths_ = 0;
  int64_t requests_ = 0;
  int64_t sessions_ = 0;
};

}  // namespace lockstep::rl
