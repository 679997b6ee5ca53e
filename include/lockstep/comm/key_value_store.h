// A key-value store that all ranks of a job share, for data that they exchange outside of
// collectives.
#pragma once

#include <chrono>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "lockstep/core/compiler.h"

namespace lockstep::comm {

// Text by key, the same for all ranks of a job: as torch.distributed's Store. A value handle:
// copies are the same keys. Any thread may call it; a call that waits delays those of other threads
// of the process. Every call but prefix() is a request to the process that serves the store, rank 0
// or the launcher, which keeps the keys until the job ends. In a world of one rank the keys are
// this process's. Throws CommError when the server is gone, when the deadline (the world's, unless
// one is given) passes, and when the launcher reports a failure during a wait.
class KeyValueStore {
 public:
  // Private to the library.
  class Keys;
  // Private to the library.
  explicit KeyValueStore(std::shared_ptr<Keys> keys, std::string prefix = {});

  // Stores any bytes under the key, in place of an earlier value; returns when the server has them.
  // Throws ConfigError for more than 64 MiB, with the key, and where the values of the job would be
  // more than 256 MiB; the store stays usable.
  void set(std::string_view key, std::string_view value) const;
  // The value; blocks until some rank has set the key.
  std::string get(std::string_view key,
                  std::optional<std::chrono::milliseconds> timeout = std::nullopt) const;
  // Blocks until all keys have been set.
  void wait(const std::vector<std::string>& keys,
            std::optional<std::chrono::milliseconds> timeout = std::nullopt) const;
  // Whether the key has been set. Does not wait.
  bool contains(std::string_view key) const;
  // Adds to the number under `key`, which starts at 0; returns the sum. Throws ConfigError when the
  // value is not a number. Past the largest int64_t it goes on with the smallest.
  int64_t add(std::string_view key, int64_t amount) const;
  // Sets `wanted` if the value is `expected`, or if there is none and `expected` is empty; returns
  // what is there afterwards (`expected`, where there is nothing). Throws as set(), of `expected`
  // and `wanted` together.
  std::string compare_set(std::string_view key, std::string_view expected,
                          std::string_view wanted) const;
  // Removes the key; returns whether there was one.
  bool erase(std::string_view key) const;

  // This store, seen through keys that begin with `name` and "/".
  KeyValueStore prefix(std::string_view name) const;

 private:
  std::string full(std::string_view key) const;

  std::shared_ptr<Keys> keys_;
  std::string prefix_;
};

}  // namespace lockstep::comm

namespace lockstep {
using comm::KeyValueStore;
}  // namespace lockstep
