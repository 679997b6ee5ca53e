// What ranks that a test forks hear of their launcher.
#pragma once

#include <cstdlib>
#include <string>

#include "core/control.h"

namespace lockstep::test {

struct PretendLauncher {
  explicit PretendLauncher(int ranks) : control(Control::create(ranks)) {
    setenv(Control::kVariable, std::to_string(control.fd()).c_str(), 1);
  }
  ~PretendLauncher() { unsetenv(Control::kVariable); }
  PretendLauncher(const PretendLauncher&) = delete;
  PretendLauncher& operator=(const PretendLauncher&) = delete;

  Control control;
};

}  // namespace lockstep::test
