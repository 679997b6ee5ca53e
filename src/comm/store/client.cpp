#include "comm/store/client.h"

#include "comm/store/values.h"
#include "lockstep/core/error.h"

namespace lockstep::comm {
namespace {

// For the server to say that it no longer waits.
constexpr std::chrono::seconds kCancelled{1};

// Of a Ping after a request: the server answers with another number where it had no room for that.
constexpr uint32_t kDone = 1;

StoreMessage about(StoreQuery query, const std::vector<std::string>& keys) {
  StoreMessage message(query);
  message.number<uint64_t>(keys.size());
  for (const std::string& key : keys) message.text(key);
  return message;
}

}  // namespace

StoreClient::StoreClient(const std::string& host, int port, Deadline deadline, Heed heed,
                         std::optional<Digest> key, bool was_there)
    : host_(host), port_(port), key_(std::move(key)), heed_(std::move(heed)) {
  StorePatience patience(deadline, heed_);
  line_ = StoreLine::meet(host_, port_, key_, patience, was_there);
}

// A turn on the connection: the requests and answers of one call. One that ends early, between a
// request and the end of its answer, closes the connection: the next would read this one's answer.
class StoreClient::Call {
 public:
  Call(StoreClient& client, Deadline deadline)
      : client_(client), patience_(deadline, client.heed_) {
    if (!client_.process_.is_here())
      throw ConfigError("[store] " + client_.process_.refusal("connection"));
    std::unique_lock lock(client_.mutex_);
    if (!client_.free_.wait_until(lock, deadline, [this] { return !client_.busy_; })) {
      throw StoreFailure("a call of another thread still waits on the connection");
    }
    if (!client_.line_ && !client_.unanswered_) {
      throw StoreFailure("the connection was closed when an answer failed to come");
    }
    client_.busy_ = true;
  }
  ~Call() {
    const std::lock_guard lock(client_.mutex_);
    if (!whole_) {
      client_.line_.reset();
      client_.cancelled_ = 0;
      client_.unanswered_ = patience_.is_over();
    }
    client_.busy_ = false;
    client_.free_.notify_all();
  }
  Call(const Call&) = delete;
  Call& operator=(const Call&) = delete;

  Call& ask(const StoreMessage& message) {
    if (!client_.line_)
      client_.line_ = StoreLine::meet(client_.host_, client_.port_, client_.key_, patience_, true);
    client_.line_->send(message.bytes(), patience_);
    return *this;
  }
  template <class T>
  T number() {
    hear_of_cancelled();
    return client_.line_->number<T>(patience_);
  }
  std::string text() {
    hear_of_cancelled();
    return client_.line_->text(patience_);
  }

  // False when it is over before anything of the answer has come.
  bool is_answered() {
    if (client_.cancelled_ > 0) {
      StorePatience now = patience_;
      if (!client_.line_->is_answered(now)) return false;
      hear_of_cancelled();
    }
    return client_.line_->is_answered(patience_);
  }
  // Of a wait: what the server still says of it comes before the next answer. True when that was
  // soon, and the wait had come to its end before.
  bool cancel() {
    patience_.extend(kCancelled);
    ask(StoreMessage(StoreQuery::CancelWait));
    whole_ = true;
    ++client_.cancelled_;
    if (!client_.line_->is_answered(patience_)) {
      // A server that does not answer for a moment is kept.
      patience_.fail(StoreLine::kUnanswered);
    }
    return hear_of_cancelled();
  }
  StorePatience& patience() { return patience_; }
  void done() { whole_ = true; }

 private:
  // True when the last of them had come to its end before it was cancelled.
  bool hear_of_cancelled() {
    bool came = false;
    for (; client_.cancelled_ > 0; --client_.cancelled_) {
      whole_ = false;
      came = client_.line_->number<char>(patience_) == kStopWaiting;
      if (came) client_.line_->number<char>(patience_);
    }
    return came;
  }

  StoreClient& client_;
  StorePatience patience_;
  bool whole_ = false;
};

void StoreClient::set(std::string_view key, std::string_view value, Deadline deadline) {
  Call(*this, deadline).ask(StoreMessage(StoreQuery::Set).text(key).text(value)).done();
}

void StoreClient::set_confirmed(std::string_view key, std::string_view value, Deadline deadline) {
  StoreMessage message(StoreQuery::Set);
  message.text(key).text(value).number(static_cast<char>(StoreQuery::Ping)).number(kDone);
  Call call(*this, deadline);
  const bool done = call.ask(message).number<uint32_t>() == kDone;
  call.done();
  if (!done) throw StoreRefusal(kStoreIsFull);
}

void StoreClient::append(std::string_view key, std::string_view value, Deadline deadline) {
  Call(*this, deadline).ask(StoreMessage(StoreQuery::Append).text(key).text(value)).done();
}

std::string StoreClient::compare_set(std::string_view key, std::string_view expected,
                                     std::string_view wanted, Deadline deadline) {
  StoreMessage message(StoreQuery::CompareSet);
  message.text(key).text(expected).text(wanted);
  message.number(static_cast<char>(StoreQuery::Ping)).number(kDone);
  Call call(*this, deadline);
  std::string now = call.ask(message).text();
  const bool done = call.number<uint32_t>() == kDone;
  call.done();
  if (!done) throw StoreRefusal(kStoreIsFull);
  return now;
}

std::vector<std::string> StoreClient::get(const std::vector<std::string>& keys, Deadline deadline) {
  Call call(*this, deadline);
  call.ask(about(StoreQuery::MultiGet, keys));
  if (!call.is_answered()) {
    call.patience().fail(std::string(StoreLine::kUnanswered) +
                         ", or another client has removed what was there");
  }
  std::vector<std::string> values;
  for (size_t i = 0; i < keys.size(); ++i) values.push_back(call.text());
  call.done();
  return values;
}

void StoreClient::wait(const std::vector<std::string>& keys, Deadline deadline) {
  Call call(*this, deadline);
  call.ask(about(StoreQuery::Wait, keys));
  if (call.is_answered()) {
    call.number<char>();
    return call.done();
  }
  // They may have come at the last moment.
  const bool came = call.cancel();
  call.done();
  if (!came) call.patience().fail<StoreUnset>("no rank has set it in time");
}

bool StoreClient::check(const std::vector<std::string>& keys, Deadline deadline) {
  Call call(*this, deadline);
  const bool all = call.ask(about(StoreQuery::Check, keys)).number<char>() == kReady;
  call.done();
  return all;
}

int64_t StoreClient::add(std::string_view key, int64_t amount, Deadline deadline) {
  Call call(*this, deadline);
  const auto sum =
      call.ask(StoreMessage(StoreQuery::Add).text(key).number(amount)).number<int64_t>();
  std::string now = std::to_string(sum);
  bool done = true;
  if (sum == kNoNumber) {
    done = call.ask(StoreMessage(StoreQuery::Ping).number(kDone)).number<uint32_t>() == kDone;
    if (done) now = call.ask(StoreMessage(StoreQuery::Get).text(key)).text();
  }
  call.done();
  if (!done) throw StoreRefusal(kStoreIsFull);
  if (now != std::to_string(sum)) throw StoreRefusal("its value is not a number");
  return sum;
}

bool StoreClient::erase(std::string_view key, Deadline deadline) {
  Call call(*this, deadline);
  const bool was = call.ask(StoreMessage(StoreQuery::Delete).text(key)).number<int64_t>() > 0;
  call.done();
  return was;
}

int64_t StoreClient::count_keys(Deadline deadline) {
  Call call(*this, deadline);
  const auto count = call.ask(StoreMessage(StoreQuery::CountKeys)).number<int64_t>();
  call.done();
  return count;
}

}  // namespace lockstep::comm
