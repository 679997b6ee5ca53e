// See config.h.
#pragma once

#include <chrono>
#include <memory>

namespace gloo {

class Context {
 public:
  Context() = delete;
  void setTimeout(std::chrono::milliseconds timeout);
};

}  // namespace gloo
