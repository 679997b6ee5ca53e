// Where the keys of a KeyValueStore are.
#pragma once

#include "comm/store/store.h"
#include "lockstep/comm/key_value_store.h"

namespace lockstep::comm {

class KeyValueStore::Keys {
 public:
  using Timeout = std::optional<std::chrono::milliseconds>;
  virtual ~Keys() = default;
  virtual void set(const std::string& key, std::string_view value) = 0;
  virtual std::string get(const std::string& key, Timeout timeout) = 0;
  virtual void wait(const std::vector<std::string>& keys, Timeout timeout) = 0;
  virtual bool contains(const std::string& key) = 0;
  virtual int64_t add(const std::string& key, int64_t amount) = 0;
  virtual std::string compare_set(const std::string& key, std::string_view expected,
                                  std::string_view wanted) = 0;
  virtual bool erase(const std::string& key) = 0;
};

// Of this process. Waits that are given no time end after `timeout`.
KeyValueStore own_keys(std::chrono::milliseconds timeout);
// Of a job's store, over a connection of its own that is made with the first call.
KeyValueStore keys_in(const Store& store, std::chrono::milliseconds timeout);

}  // namespace lockstep::comm
