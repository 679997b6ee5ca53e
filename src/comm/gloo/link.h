// Messages over the connections of a c10d Gloo group.
#pragma once

#include "comm/direct/link.h"
#include "comm/gloo/group.h"

namespace lockstep::comm {

// `group` must outlive its transfers. Gloo itself aborts a message, and closes all of the group's
// connections with it, after `patience`.
class GlooLink final : public Link {
 public:
  GlooLink(c10::intrusive_ptr<GlooGroup> group, std::chrono::milliseconds patience)
      : group_(std::move(group)), patience_(patience) {}

  int rank() const override { return group_->getRank(); }
  int size() const override { return group_->getSize(); }
  std::unique_ptr<Transfer> send(int peer, uint32_t tag, const char* data, int64_t bytes) override;
  std::unique_ptr<Transfer> recv(int peer, uint32_t tag, char* data, int64_t bytes) override;

 private:
  const c10::intrusive_ptr<GlooGroup> group_;
  const std::chrono::milliseconds patience_;
};

}  // namespace lockstep::comm
