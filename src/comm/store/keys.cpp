#include "comm/store/keys.h"

#include <fmt/format.h>

#include <algorithm>
#include <condition_variable>
#include <mutex>
#include <utility>

#include "comm/store/protocol.h"
#include "comm/store/values.h"
#include "comm/text.h"
#include "core/process/own_process.h"
#include "core/time_limit.h"
#include "lockstep/core/error.h"

namespace lockstep::comm {
namespace {

using Timeout = KeyValueStore::Keys::Timeout;

Timeout within(const Timeout& timeout) { return timeout ? Timeout(bounded(*timeout)) : timeout; }

void check_size(std::string_view what, const std::string& key, size_t bytes) {
  if (key.size() + bytes <= kMostText) return;
  throw ConfigError(
      fmt::format("[store] {} {}: {} bytes, and a value may have 64 MiB, with its key", what,
                  beginning_of(key), bytes));
}

class OwnKeys final : public KeyValueStore::Keys {
 public:
  explicit OwnKeys(std::chrono::milliseconds timeout) : timeout_(timeout) {}

  void set(const std::string& key, std::string_view value) override {
    const std::lock_guard lock(mutex_);
    change("set", key, [&] { values_.put(key, std::string(value)); });
  }
  std::string get(const std::string& key, Timeout timeout) override {
    std::unique_lock lock(mutex_);
    await(lock, {key}, timeout);
    return values_.at(key);
  }
  void wait(const std::vector<std::string>& keys, Timeout timeout) override {
    std::unique_lock lock(mutex_);
    await(lock, keys, timeout);
  }
  bool contains(const std::string& key) override {
    const std::lock_guard lock(mutex_);
    return values_.has(key);
  }
  int64_t add(const std::string& key, int64_t amount) override {
    const std::lock_guard lock(mutex_);
    std::optional<int64_t> sum;
    change("add to", key, [&] { sum = values_.add(key, amount); });
    if (!sum) {
      throw ConfigError(
          fmt::format("[store] add to {}: its value is not a number", beginning_of(key)));
    }
    return *sum;
  }
  std::string compare_set(const std::string& key, std::string_view expected,
                          std::string_view wanted) override {
    const std::lock_guard lock(mutex_);
    const std::string* const found = values_.find(key);
    if (found == nullptr && !expected.empty()) return std::string(expected);
    if (found != nullptr && *found != expected) return *found;
    change("compare_set", key, [&] { values_.put(key, std::string(wanted)); });
    return std::string(wanted);
  }
  bool erase(const std::string& key) override {
    const std::lock_guard lock(mutex_);
    return values_.erase(key);
  }

 private:
  template <class Change>
  void change(std::string_view what, const std::string& key, const Change& make) {
    try {
      make();
    } catch (const Error&) {
      throw ConfigError(fmt::format("[store] {} {}: {}", what, beginning_of(key), kStoreIsFull));
    }
    changed_.notify_all();
  }
  void await(std::unique_lock<std::mutex>& lock, const std::vector<std::string>& keys,
             Timeout given) {
    const auto timeout = given.value_or(timeout_);
    const auto all = [&] {
      return std::all_of(keys.begin(), keys.end(),
                         [&](const std::string& key) { return values_.has(key); });
    };
    if (changed_.wait_for(lock, timeout, all)) return;
    const auto missing = std::find_if(keys.begin(), keys.end(),
                                      [&](const std::string& key) { return !values_.has(key); });
    throw CommError(fmt::format("[store] wait for {}: no rank has set it within {}",
                                beginning_of(*missing), text_of(timeout)));
  }

  std::mutex mutex_;
  std::condition_variable changed_;
  StoreValues values_;
  const std::chrono::milliseconds timeout_;
};

class JobKeys final : public KeyValueStore::Keys {
 public:
  JobKeys(Store store, std::chrono::milliseconds timeout)
      : store_(std::move(store)), timeout_(timeout) {}

  // A server that is gone would not have it, nor would the next call know.
  void set(const std::string& key, std::string_view value) override {
    there().set_confirmed(key, value);
  }
  std::string get(const std::string& key, Timeout timeout) override {
    return there().get(key, timeout.value_or(timeout_));
  }
  void wait(const std::vector<std::string>& keys, Timeout timeout) override {
    there().wait(keys, timeout.value_or(timeout_));
  }
  bool contains(const std::string& key) override { return there().check({key}); }
  int64_t add(const std::string& key, int64_t amount) override { return there().add(key, amount); }
  std::string compare_set(const std::string& key, std::string_view expected,
                          std::string_view wanted) override {
    const auto bytes = [](std::string_view text) {
      return std::vector<uint8_t>(text.begin(), text.end());
    };
    const auto left = there().for_c10d()->compareSet(key, bytes(expected), bytes(wanted));
    return {left.begin(), left.end()};
  }
  bool erase(const std::string& key) override { return there().for_c10d()->deleteKey(key); }

 private:
  // Waits here do not block the job's own connection. A child by fork() has another one.
  const Store& there() {
    const std::lock_guard lock(mutex_);
    if (!own_ || !process_.is_here()) {
      own_.emplace(store_.clone(timeout_));
      process_ = OwnProcess();
    }
    return *own_;
  }

  const Store store_;
  const std::chrono::milliseconds timeout_;
  std::mutex mutex_;
  OwnProcess process_;
  std::optional<Store> own_;
};

}  // namespace

KeyValueStore own_keys(std::chrono::milliseconds timeout) {
  return KeyValueStore(std::make_shared<OwnKeys>(timeout));
}

KeyValueStore keys_in(const Store& store, std::chrono::milliseconds timeout) {
  return KeyValueStore(std::make_shared<JobKeys>(store, timeout));
}

KeyValueStore::KeyValueStore(std::shared_ptr<Keys> keys, std::string prefix)
    : keys_(std::move(keys)), prefix_(std::move(prefix)) {}

std::string KeyValueStore::full(std::string_view key) const { return prefix_ + std::string(key); }

void KeyValueStore::set(std::string_view key, std::string_view value) const {
  const std::string whole = full(key);
  check_size("set", whole, value.size());
  keys_->set(whole, value);
}

std::string KeyValueStore::get(std::string_view key,
                               std::optional<std::chrono::milliseconds> timeout) const {
  return keys_->get(full(key), within(timeout));
}

void KeyValueStore::wait(const std::vector<std::string>& keys,
                         std::optional<std::chrono::milliseconds> timeout) const {
  std::vector<std::string> all;
  for (const std::string& key : keys) all.push_back(full(key));
  keys_->wait(all, within(timeout));
}

bool KeyValueStore::contains(std::string_view key) const { return keys_->contains(full(key)); }

int64_t KeyValueStore::add(std::string_view key, int64_t amount) const {
  return keys_->add(full(key), amount);
}

std::string KeyValueStore::compare_set(std::string_view key, std::string_view expected,
                                       std::string_view wanted) const {
  const std::string whole = full(key);
  check_size("compare_set", whole, expected.size() + wanted.size());
  return keys_->compare_set(whole, expected, wanted);
}

bool KeyValueStore::erase(std::string_view key) const { return keys_->erase(full(key)); }

KeyValueStore KeyValueStore::prefix(std::string_view name) const {
  return KeyValueStore(keys_, full(name) + "/");
}

}  // namespace lockstep::comm
