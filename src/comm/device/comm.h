// What moves tensors between devices, as far as its start and end are concerned.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

namespace lockstep::comm {

// A call in a CUDA graph that the device is in.
struct ReplayedCall {
  uint32_t number = 0;       // of the call, as DeviceCall::captured
  uint32_t before = 0;       // calls in graphs that were over then
  uint32_t collectives = 0;  // of these
  bool operator==(const ReplayedCall&) const = default;
};

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

  // Which of the calls in CUDA graphs runs now, where there can be any.
  virtual std::optional<ReplayedCall> replayed() const noexcept { return std::nullopt; }
  // What has gone wrong since; never blocks.
  virtual std::optional<std::string> async_error() = 0;
  // Ends what is under way; nothing is moved any more.
  virtual void abort() noexcept = 0;
  // After abort(): blocks until kernels that were enqueued use no memory of calls any more.
  virtual void drain() noexcept {}
};

}  // namespace lockstep::comm
