// What a key-value store holds. No torch.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <utility>

namespace lockstep::comm {

// The number that `text` is, 0 where it is empty; nothing where it is none.
std::optional<int64_t> stored_number(std::string_view text);

// What errors say of it.
inline constexpr const char* kStoreIsFull = "the store is full: it holds 256 MiB in all";

// put, append, add and push throw Error when the store is full, and change nothing then.
class StoreValues {
 public:
  // Of values and keys together. Beyond, only short values are taken, so that ranks can still find
  // each other, up to a quarter more.
  static constexpr size_t kMost = size_t{256} << 20;
  static constexpr size_t kShort = 4 << 10;

  void put(const std::string& key, std::string value);
  void append(const std::string& key, std::string_view more);
  // Returns the sum, of 0 where there is no value. Nothing, and changes nothing, where the value is
  // no number.
  std::optional<int64_t> add(const std::string& key, int64_t amount);
  bool erase(const std::string& key);
  const std::string* find(const std::string& key) const;
  // Throws std::out_of_range.
  const std::string& at(const std::string& key) const { return values_.at(key); }
  // 0 where there is none, or a value that is not a number.
  int64_t number(const std::string& key) const;
  const std::map<std::string, std::string>& all() const { return values_; }

  void push(const std::string& key, const std::string& value);
  std::optional<std::string> pop(const std::string& key);
  size_t queue_length(const std::string& key) const;

  // As a value or a queue.
  bool has(const std::string& key) const { return values_.contains(key) || queues_.contains(key); }
  // Whether anything was set since the last call.
  bool take_changed() { return std::exchange(changed_, false); }

 private:
  void hold(size_t more, size_t whole);

  std::map<std::string, std::string> values_;
  std::map<std::string, std::deque<std::string>> queues_;
  size_t held_ = 0;
  bool changed_ = false;
};

}  // namespace lockstep::comm
