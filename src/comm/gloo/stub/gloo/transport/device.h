// See config.h of the parent folder.
#pragma once

#include <memory>

namespace gloo::transport {

class Device;
class Context;

// Complete only because c10d's header holds unique_ptr<UnboundBuffer>.
class UnboundBuffer {
 public:
  virtual ~UnboundBuffer() = 0;
};

}  // namespace gloo::transport
