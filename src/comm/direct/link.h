// Messages between the ranks of a group, independent of the transport. No torch.
#pragma once

#include <cstdint>
#include <memory>

namespace lockstep::comm {

// A message on its way. One that is not over may be dropped only when the link is not used any
// more.
class Transfer {
 public:
  virtual ~Transfer() = default;
  // Blocks until the message's memory may be used again; throws what ended it.
  virtual void wait() = 0;
};

// Any thread may call it.
class Link {
 public:
  virtual ~Link() = default;
  virtual int rank() const = 0;
  virtual int size() const = 0;
  // A send matches the receive of the same peer, tag and number of bytes; those of one peer and tag
  // in order. The memory stays untouched until the transfer is over. Tags have 31 bits.
  virtual std::unique_ptr<Transfer> send(int peer, uint32_t tag, const char* data,
                                         int64_t bytes) = 0;
  virtual std::unique_ptr<Transfer> recv(int peer, uint32_t tag, char* data, int64_t bytes) = 0;
};

}  // namespace lockstep::comm
