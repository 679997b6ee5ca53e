#include "comm/gloo/link.h"

#include <ATen/ATen.h>

namespace lockstep::comm {
namespace {

class GlooTransfer final : public Transfer {
 public:
  GlooTransfer(c10::intrusive_ptr<c10d::Work> work, std::chrono::milliseconds patience)
      : work_(std::move(work)), patience_(patience) {}
  void wait() override { work_->wait(patience_); }

 private:
  const c10::intrusive_ptr<c10d::Work> work_;
  const std::chrono::milliseconds patience_;
};

// Gloo needs an address even where it moves nothing.
std::vector<at::Tensor> bytes_at(const char* data, int64_t bytes) {
  static char nothing;
  return {at::from_blob(bytes > 0 ? const_cast<char*>(data) : &nothing, {bytes}, at::kByte)};
}

}  // namespace

std::unique_ptr<Transfer> GlooLink::send(int peer, uint32_t tag, const char* data, int64_t bytes) {
  auto tensors = bytes_at(data, bytes);
  const std::lock_guard lock(group_->mutex());
  return std::make_unique<GlooTransfer>(group_->send(tensors, peer, static_cast<int>(tag)),
                                        patience_);
}

std::unique_ptr<Transfer> GlooLink::recv(int peer, uint32_t tag, char* data, int64_t bytes) {
  auto tensors = bytes_at(data, bytes);
  const std::lock_guard lock(group_->mutex());
  return std::make_unique<GlooTransfer>(group_->recv(tensors, peer, static_cast<int>(tag)),
                                        patience_);
}

}  // namespace lockstep::comm
