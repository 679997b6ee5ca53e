#include "comm/store/values.h"

#include "core/number.h"
#include "lockstep/core/error.h"

namespace lockstep::comm {

std::optional<int64_t> stored_number(std::string_view text) {
  if (text.empty()) return 0;
  return whole_number_from<int64_t>(text);
}

// Room for `more` bytes of a value that is `whole` then.
void StoreValues::hold(size_t more, size_t whole) {
  const size_t most = whole <= kShort ? kMost + kMost / 4 : kMost;
  if (held_ + more > most) throw Error("the store is full");
  held_ += more;
  changed_ = true;
}

void StoreValues::put(const std::string& key, std::string value) {
  const auto found = values_.find(key);
  if (found == values_.end()) {
    hold(key.size() + value.size(), value.size());
    values_.emplace(key, std::move(value));
    return;
  }
  std::string& old = found->second;
  if (value.size() > old.size()) {
    hold(value.size() - old.size(), value.size());
  } else {
    held_ -= old.size() - value.size();
  }
  old = std::move(value);
  changed_ = true;
}

void StoreValues::append(const std::string& key, std::string_view more) {
  const auto found = values_.find(key);
  if (found == values_.end()) return put(key, std::string(more));
  hold(more.size(), found->second.size() + more.size());
  found->second += more;
}

std::optional<int64_t> StoreValues::add(const std::string& key, int64_t amount) {
  const std::string* const text = find(key);
  const auto before = stored_number(text != nullptr ? *text : std::string_view());
  if (!before) return std::nullopt;
  // Past its end it begins again, as it would without a check.
  const auto sum =
      static_cast<int64_t>(static_cast<uint64_t>(*before) + static_cast<uint64_t>(amount));
  put(key, std::to_string(sum));
  return sum;
}

bool StoreValues::erase(const std::string& key) {
  const auto found = values_.find(key);
  if (found == values_.end()) return false;
  held_ -= key.size() + found->second.size();
  values_.erase(found);
  return true;
}

const std::string* StoreValues::find(const std::string& key) const {
  const auto found = values_.find(key);
  return found == values_.end() ? nullptr : &found->second;
}

int64_t StoreValues::number(const std::string& key) const {
  const std::string* const text = find(key);
  return text != nullptr ? stored_number(*text).value_or(0) : 0;
}

void StoreValues::push(const std::string& key, const std::string& value) {
  hold(key.size() + value.size(), value.size());
  queues_[key].push_back(value);
}

std::optional<std::string> StoreValues::pop(const std::string& key) {
  const auto queue = queues_.find(key);
  if (queue == queues_.end()) return std::nullopt;
  std::string oldest = std::move(queue->second.front());
  held_ -= key.size() + oldest.size();
  queue->second.pop_front();
  if (queue->second.empty()) queues_.erase(queue);
  return oldest;
}

size_t StoreValues::queue_length(const std::string& key) const {
  const auto queue = queues_.find(key);
  return queue == queues_.end() ? 0 : queue->second.size();
}

}  // namespace lockstep::comm
