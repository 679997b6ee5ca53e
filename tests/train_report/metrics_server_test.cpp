// The Prometheus endpoint, asked by clients of every kind.
#include "train/report/exporters/metrics_server.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <poll.h>
#include <sys/socket.h>

#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "lockstep/core/error.h"
#include "support/loopback.h"

namespace lockstep::train {
namespace {

using ::testing::EndsWith;
using ::testing::HasSubstr;
using ::testing::StartsWith;

int port_of(const MetricsServer& server) {
  const std::string url = server.url();
  return std::stoi(url.substr(url.rfind(':') + 1));
}

// Connected, with whatever has been said.
Fd said(const MetricsServer& server, std::string_view bytes) {
  Fd fd = test::connection_to(port_of(server));
  // The server may have closed it by now.
  (void)!send(fd.get(), bytes.data(), bytes.size(), MSG_NOSIGNAL);
  return fd;
}

// All that comes until the server closes.
std::string heard(const Fd& fd) {
  std::string all;
  char bytes[4096];
  for (ssize_t count; (count = recv(fd.get(), bytes, sizeof bytes, 0)) > 0;) {
    all.append(bytes, static_cast<size_t>(count));
  }
  return all;
}

std::string asked(const MetricsServer& server, std::string_view request) {
  return heard(said(server, request));
}

TEST(Prometheus, IsAnsweredWithTheLastReport) {
  MetricsServer server("127.0.0.1:0");
  EXPECT_THAT(server.url(), StartsWith("http://127.0.0.1:"));
  server.publish("lockstep_step 1\n# EOF\n");
  const std::string first = asked(server, "GET /metrics HTTP/1.1\r\nHost: a\r\n\r\n");
  EXPECT_THAT(first, StartsWith("HTTP/1.1 200 OK\r\n"));
  EXPECT_THAT(first, HasSubstr("Content-Type: text/plain; version=0.0.4; charset=utf-8\r\n"));
  EXPECT_THAT(first, HasSubstr("Content-Length: 22\r\n"));
  EXPECT_THAT(first, EndsWith("\r\n\r\nlockstep_step 1\n# EOF\n"));
  server.publish("lockstep_step 2\n# EOF\n");
  const std::string second =
      asked(server, "GET /metrics?a=b HTTP/1.1\r\nAccept: application/openmetrics-text\r\n\r\n");
  EXPECT_THAT(second, HasSubstr("Content-Type: application/openmetrics-text; version=1.0.0"));
  EXPECT_THAT(second, EndsWith("lockstep_step 2\n# EOF\n"));
}

TEST(Prometheus, OtherRequestsAreRefusedByName) {
  MetricsServer server("127.0.0.1:0");
  EXPECT_THAT(asked(server, "GET / HTTP/1.1\r\n\r\n"), StartsWith("HTTP/1.1 404 "));
  EXPECT_THAT(asked(server, "POST /metrics HTTP/1.1\r\nContent-Length: 3\r\n\r\nabc"),
              StartsWith("HTTP/1.1 405 "));
  EXPECT_THAT(asked(server, "\x16\x03\x01 nonsense\r\n\r\n"), StartsWith("HTTP/1.1 400 "));
  EXPECT_THAT(asked(server, std::string(MetricsServer::kRequest + 2048, 'x')),
              StartsWith("HTTP/1.1 431 "));
  const std::string head = asked(server, "HEAD /metrics HTTP/1.1\r\n\r\n");
  EXPECT_THAT(head, HasSubstr("Content-Length: 6\r\n"));
  EXPECT_THAT(head, EndsWith("\r\n\r\n"));
}

TEST(Prometheus, ClientsThatSayNothingMakeRoomForOthers) {
  MetricsServer server("127.0.0.1:0");
  std::vector<Fd> silent;
  for (size_t i = 0; i < MetricsServer::kClients + 8; ++i) silent.push_back(said(server, "GET "));
  EXPECT_THAT(asked(server, "GET /metrics HTTP/1.1\r\n\r\n"), EndsWith("# EOF\n"));
  // The first has been left.
  EXPECT_EQ(heard(silent.front()), "");
}

TEST(Prometheus, AReaderThatDoesNotReadDelaysNobody) {
  MetricsServer server("127.0.0.1:0");
  const std::string large(64 << 20, 'x');  // more than sockets buffer
  server.publish(large);
  const Fd slow = said(server, "GET /metrics HTTP/1.1\r\n\r\n");
  pollfd answered{slow.get(), POLLIN, 0};
  ASSERT_EQ(poll(&answered, 1, 60'000), 1);
  server.publish("# EOF\n");
  EXPECT_THAT(asked(server, "GET /metrics HTTP/1.1\r\n\r\n"), EndsWith("# EOF\n"));
  // It ends with the server.
}

TEST(Prometheus, AnAddressThatCannotBeHadIsAnError) {
  EXPECT_THROW(MetricsServer("127.0.0.1:port"), ConfigError);
  EXPECT_THROW(MetricsServer("192.0.2.1:0"), ConfigError);  // of documentation, RFC 5737
  const test::LoopbackSocket taken = std::move(test::LoopbackSocket().listen());
  try {
    MetricsServer server("127.0.0.1:" + std::to_string(taken.port));
    ADD_FAILURE();
  } catch (const Error& error) {
    EXPECT_THAT(error.what(), HasSubstr("Address already in use"));
  }
}

}  // namespace
}  // namespace lockstep::train
