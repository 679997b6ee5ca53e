// What moves tensors between devices, as far as its start and end are concerned.
#pragma once

#include <optional>
#include <string>
#include <string_view>

namespace lockstep::comm {

class DeviceComm {
 public:
  virtual ~DeviceComm() = default;
  virtual std::string_view name() const = 0;

  // The one thread that makes calls.

  // Meets the other ranks; the caller's current device is the communicator's. Throws CommError.
  virtual void connect() = 0;
  // Ends the communicator, of which all calls are over.
  virtual void close() noexcept = 0;

  // Any thread.

  // What has gone wrong since; never blocks.
  virtual std::optional<std::string> async_error() = 0;
  // Ends what is under way; nothing is moved any more.
  virtual void abort() noexcept = 0;
  // After abort(): blocks until kernels that were enqueued use no memory of calls any more.
  virtual void drain() noexcept {}
};

}  // namespace lockstep::comm
