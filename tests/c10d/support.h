// Ranks that have a backend of c10d's.
#pragma once

#include <unistd.h>

#include <functional>
#include <string>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/FileStore.hpp>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

#include "lockstep/c10d/backend.h"
#include "support/spawn.h"

namespace lockstep::test {

using StorePtr = c10::intrusive_ptr<::c10d::Store>;

// A store that is neither Lockstep's nor on a port.
inline StorePtr file_store(const std::string& path, int ranks) {
  return c10::make_intrusive<::c10d::FileStore>(path, ranks);
}

// As spawn(), with a backend in the place of a World, and the store it came from.
inline std::vector<int> spawn_backends(
    int ranks, const std::function<void(::c10d::Backend&, const StorePtr&)>& body,
    const SpawnOptions& options = {}) {
  std::string path = testing::TempDir() + "c10d-XXXXXX";
  close(mkstemp(path.data()));
  const auto statuses = spawn_bare(
      ranks,
      [&](int rank) {
        setenv("GLOO_SOCKET_IFNAME", "lo", 1);
        const auto store = file_store(path, ranks);
        const auto backend =
            c10d_backend::make_backend(c10::make_intrusive<::c10d::PrefixStore>("world", store),
                                       {rank, ranks}, {.timeout = options.timeout});
        body(*backend, store);
        backend->shutdown();
      },
      options);
  unlink(path.c_str());
  return statuses;
}

inline std::vector<int> spawn_backends(
    const Ranks& ranks, const std::function<void(::c10d::Backend&, const StorePtr&)>& body) {
  return spawn_backends(ranks.count, body, {.backend = ranks.backend, .hosts = ranks.hosts});
}

using Tensors = std::vector<at::Tensor>;

// Of values that every rank can compute: element i is rank + i.
inline at::Tensor numbers(int rank, int64_t count, at::ScalarType dtype = at::kFloat) {
  return (at::arange(count, at::kLong) + rank).to(dtype);
}

}  // namespace lockstep::test
