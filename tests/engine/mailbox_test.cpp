#include "comm/shm/mailbox.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <optional>
#include <thread>
#include <vector>

namespace lockstep::comm {
namespace {

using namespace std::chrono_literals;

constexpr int64_t kSlotBytes = 32 << 10;

struct alignas(4096) Page {
  char bytes[4096];
};

std::shared_ptr<Message> message(bool sending, std::vector<char>& data) {
  auto made = std::make_shared<Message>();
  made->sending = sending;
  made->peer = sending ? 1 : 0;
  made->dtype = "uint8";
  made->count = made->bytes = static_cast<int64_t>(data.size());
  made->data = data.data();
  return made;
}

// A large slot that was last used 2^31 to 2^32 pieces ago is free, too.
TEST(Mailbox, ASlotIsFreeHoweverLongAgoItWasUsed) {
  std::vector<RankBlock> blocks(2);
  std::optional<Channel> channels[2];
  std::thread other([&] { channels[1].emplace(blocks.data(), 1, 2, 60s, nullptr); });
  channels[0].emplace(blocks.data(), 0, 2, 60s, nullptr);
  other.join();
  std::vector<Page> memory(Mailbox::bytes_for(2) / sizeof(Page) + 1);
  char* const start = memory.data()->bytes;
  Mailbox sender(start, *channels[0]), receiver(start, *channels[1]);

  std::vector<char> sent(2 * kSlotBytes, 'x'), received(sent.size());
  const auto pass = [&] {
    const auto out = message(true, sent), in = message(false, received);
    sender.start(out);
    EXPECT_EQ(out->moved, 2 * kSlotBytes);  // both pieces in large slots
    receiver.start(in);
    EXPECT_TRUE(in->over);
    std::fill(received.begin(), received.end(), 0);
  };
  pass();
  // As after 3 * 2^30 more pieces in small slots: the counters begin the box of 0 to 1.
  char* const box = start + (Mailbox::bytes_for(2) - 2 * 2 * kSlotBytes) / 4;
  for (const int64_t counter : {0, 128})
    reinterpret_cast<std::atomic<uint32_t>*>(box + counter)->fetch_add(3u << 30);
  pass();
  EXPECT_EQ(sender.waiting() + receiver.waiting(), 0);
}

}  // namespace
}  // namespace lockstep::comm
