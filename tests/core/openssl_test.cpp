// OpenSSL stays until the process has ended: threads of ours use it while exit() runs.
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdlib>
#include <functional>

#include "core/hash/sha256.h"
#include "core/security/tls.h"
#include "core/security/token.h"

namespace lockstep {
namespace {

// What the server has of the client's text, over a connection that ends here.
std::string sent_over_tls() {
  const Digest key{7};
  Tls client(Tls::Role::Client, key), server(Tls::Role::Server, key);
  client.write("text");
  std::string text;
  for (int flight = 0; flight < 3; ++flight) {
    text += server.feed(client.take_output());
    client.feed(server.take_output());
  }
  return text;
}

bool g_uses_it_last = false;

// Registered before main(), so of all handlers it is the last that exit() calls.
[[maybe_unused]] const int registered = std::atexit([] {
  if (!g_uses_it_last) return;
  int status = 1;
  try {
    status = sent_over_tls() == "text" ? 0 : 2;
  } catch (const std::exception&) {
  }
  _exit(status);
});

TEST(OpenSsl, StaysUntilTheProcessHasEndedWhoeverUsesItFirst) {
  const std::function<void()> firsts[] = {[] { sent_over_tls(); }, [] { hmac("key", {"text"}); },
                                          [] { sha256("text"); }};
  for (const auto& first : firsts) {
    const pid_t pid = fork();
    if (pid == 0) {
      g_uses_it_last = true;
      first();
      std::exit(3);
    }
    int status = 0;
    ASSERT_EQ(waitpid(pid, &status, 0), pid);
    EXPECT_EQ(status, 0) << &first - firsts;
  }
}

}  // namespace
}  // namespace lockstep
