// The collectives that move elements and combine none, and messages: on device tensors as on CPU
// tensors over any transport. `make(count, seed, dtype)` makes a rank's elements.
#pragma once

#include "device/alike.h"

namespace lockstep::test {

template <class Make>
void expect_all_gathers_alike(World& world, const Make& make) {
  for_all([&](auto dtype, int64_t size, const std::string& what) {
    expect_alike(
        world, {at::zeros({size * world.size()}, dtype), make(size, world.rank(), dtype)},
        [&](auto& t) { world.group().all_gather(t[0], t[1]).wait(); }, what);
    std::vector<at::Tensor> tensors{make(size + 3 * world.rank(), world.rank(), dtype)};
    for (int r = 0; r < world.size(); ++r) tensors.push_back(at::zeros({size + 3 * r}, dtype));
    expect_alike(
        world, tensors,
        [&](auto& t) {
          world.group().all_gather({t.begin() + 1, t.end()}, t[0]).wait();
        },
        what);
  });
}

template <class Make>
void expect_broadcasts_alike(World& world, const Make& make) {
  for_all([&](auto dtype, int64_t size, const std::string& what) {
    expect_alike(
        world, {make(size, world.rank(), dtype)},
        [&](auto& t) { world.group().broadcast(t[0], 1).wait(); }, what);
  });
}

template <class Make>
void expect_gathers_and_scatters_alike(World& world, const Make& make) {
  const int root = 1;
  for_all([&](auto dtype, int64_t size, const std::string& what) {
    std::vector<at::Tensor> tensors{make(size + world.rank(), world.rank(), dtype)};
    for (int r = 0; world.rank() == root && r < world.size(); ++r)
      tensors.push_back(at::zeros({size + r}, dtype));
    expect_alike(
        world, tensors,
        [&](auto& t) {
          world.group().gather({t.begin() + 1, t.end()}, t[0], root).wait();
        },
        what);
    for (size_t i = 1; i < tensors.size(); ++i)
      tensors[i] = make(size + static_cast<int64_t>(i) - 1, static_cast<int>(i), dtype);
    expect_alike(
        world, tensors,
        [&](auto& t) {
          world.group().scatter(t[0], {t.begin() + 1, t.end()}, root).wait();
        },
        what);
  });
}

template <class Make>
void expect_all_to_alls_alike(World& world, const Make& make) {
  const int n = world.size();
  for_all([&](auto dtype, int64_t size, const std::string& what) {
    expect_alike(
        world, {at::zeros({n * size}, dtype), make(n * size, world.rank(), dtype)},
        [&](auto& t) { world.group().all_to_all(t[0], t[1]).wait(); }, what);
    std::vector<at::Tensor> tensors;
    for (int r = 0; r < n; ++r)
      tensors.push_back(make(size + world.rank() + 2 * r, world.rank(), dtype));
    for (int r = 0; r < n; ++r) tensors.push_back(at::zeros({size + r + 2 * world.rank()}, dtype));
    expect_alike(
        world, tensors,
        [&](auto& t) {
          world.group().all_to_all({t.begin() + n, t.end()}, {t.begin(), t.begin() + n}).wait();
        },
        what);
  });
}

// All send before any receives.
template <class Make>
void expect_messages_round_a_ring_alike(World& world, const Make& make) {
  const int n = world.size(), to = (world.rank() + 1) % n, from = (world.rank() + n - 1) % n;
  for_all([&](auto dtype, int64_t size, const std::string& what) {
    expect_alike(
        world, {make(size, world.rank(), dtype), at::zeros({size}, dtype)},
        [&](auto& t) {
          comm::Work sent = world.group().send(t[0], to, 5);
          comm::Work received = world.group().recv(t[1], from, 5);
          sent.wait();
          received.wait();
        },
        what);
  });
}

}  // namespace lockstep::test
