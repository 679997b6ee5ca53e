// Every collective of Group in every dtype and several sizes against values that each rank works
// out by itself, and the order of operations on a device.
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <initializer_list>
#include <utility>

#include "on_gpu/checks.h"

namespace lockstep::on_gpu {
namespace {

const std::vector<at::ScalarType>& dtypes() {
  static const std::vector<at::ScalarType> all{at::kFloat,    at::kDouble, at::kHalf,
                                               at::kBFloat16, at::kChar,   at::kShort,
                                               at::kInt,      at::kLong,   at::kByte};
  return all;
}

// One element, less than a vector, odd, several blocks of a kernel, and more than a bucket's first
// megabyte of float32.
const std::vector<int64_t>& sizes() {
  static const std::vector<int64_t> all{1, 3, 1001, 65536, 300'007};
  return all;
}

// Small whole numbers, so that sums are exact in every dtype and no order of addition matters.
at::Tensor values(int rank, int64_t count) {
  return at::arange(count).mul(rank + 3).remainder(5).add(rank % 3);
}

std::vector<at::Tensor> values_of_all(const World& world, int64_t count) {
  std::vector<at::Tensor> all;
  for (int rank = 0; rank < world.size(); ++rank) all.push_back(values(rank, count));
  return all;
}

at::Tensor combined(const std::vector<at::Tensor>& all, ReduceOp op) {
  const at::Tensor stack = at::stack(all);
  switch (op) {
    case ReduceOp::Min:
      return std::get<0>(stack.min(0));
    case ReduceOp::Max:
      return std::get<0>(stack.max(0));
    case ReduceOp::Average:
      return stack.sum(0).to(at::kDouble) / static_cast<double>(all.size());
    default:
      return stack.sum(0);
  }
}

// Each body for all dtypes and sizes.
void everywhere(const Group& group,
                const std::function<void(at::ScalarType, int64_t, const std::string&)>& body) {
  for (const auto dtype : dtypes()) {
    for (const int64_t size : sizes()) {
      body(dtype, size, std::string(c10::toString(dtype)) + ", " + std::to_string(size));
    }
  }
  group.barrier().wait();
}

void all_reduce(const World& world, const Group& group) {
  everywhere(group, [&](at::ScalarType dtype, int64_t size, const std::string& what) {
    for (const auto op : {ReduceOp::Sum, ReduceOp::Min, ReduceOp::Max}) {
      const at::Tensor mine = values(world.rank(), size).to(on(world, dtype));
      group.all_reduce(mine, op).wait();
      expect_equal("all_reduce of " + what, mine,
                   combined(values_of_all(world, size), op).to(dtype));
    }
  });
}

void average(const World& world, const Group& group) {
  for (const auto dtype : {at::kFloat, at::kDouble}) {
    const at::Tensor mine = values(world.rank(), 1001).to(on(world, dtype));
    group.all_reduce(mine, ReduceOp::Average).wait();
    expect_close("average", mine, combined(values_of_all(world, 1001), ReduceOp::Average).to(dtype),
                 1e-6);
  }
}

// Sums whose order shows, of several rounds, too, against those of CPU tensors over shared memory.
void same_bits(const World& world, const Group& group) {
  if (!group.deterministic()) return;
  for (const auto dtype : {at::kFloat, at::kDouble, at::kHalf, at::kBFloat16}) {
    for (const int64_t size : {1, 1001, 300'007, 5'000'000}) {
      auto generator = at::detail::createCPUGenerator(static_cast<uint64_t>(world.rank() + size));
      const at::Tensor here = at::randn({size}, generator).to(dtype);
      const at::Tensor there = here.to(world.device());
      for (const auto op : {ReduceOp::Sum, ReduceOp::Average}) {
        world.group().all_reduce(here, op).wait();
        group.all_reduce(there, op).wait();
        expect_equal("sums of " + std::to_string(size), there, here);
      }
    }
  }
}

// The same in memory that all ranks map, where there is such: at one place on all, at several, and
// in ordinary memory of one rank.
void in_shared_memory(const World& world, const Group& group) {
  if (!group.deterministic()) return;
  constexpr int64_t kCount = 3'000'001;
  const int rank = world.rank(), size = world.size();
  for (const auto dtype : {at::kFloat, at::kBFloat16}) {
    const at::Tensor memory = group.empty({kCount + 16}, on(world, dtype));
    const std::vector<at::Tensor> places{
        memory.narrow(0, 0, kCount), memory.narrow(0, 16, kCount),
        memory.narrow(0, 8 * (rank % 2), kCount),
        rank == 0 ? at::zeros({kCount}, on(world, dtype)) : memory.narrow(0, 0, kCount)};
    for (size_t i = 0; i < places.size(); ++i) {
      auto generator = at::detail::createCPUGenerator(static_cast<uint64_t>(rank));
      const at::Tensor here = at::randn({kCount}, generator).to(dtype);
      for (int repeat = 0; repeat < 3; ++repeat) {
        places[i].copy_(here);
        group.all_reduce(places[i]).wait();
        const at::Tensor sum = here.clone();
        world.group().all_reduce(sum).wait();
        expect_equal("sums at place " + std::to_string(i), places[i], sum);
      }
      const int64_t part = kCount / size / 8 * 8;
      const at::Tensor whole = places[i].narrow(0, 0, part * size), summed = here.clone();
      whole.copy_(here.narrow(0, 0, part * size));
      const at::Tensor own = at::zeros({part}, on(world, dtype));
      group.reduce_scatter(own, whole).wait();
      world.group().all_reduce(summed).wait();
      expect_equal("a part of the sum", own, summed.narrow(0, rank * part, part));
      group.all_gather(whole, own).wait();
      expect_equal("all parts of it", whole, summed.narrow(0, 0, part * size));
    }
  }
}

void reduce(const World& world, const Group& group) {
  everywhere(group, [&](at::ScalarType dtype, int64_t size, const std::string& what) {
    const int root = world.size() - 1;
    const at::Tensor own = values(world.rank(), size);
    const at::Tensor mine = own.to(on(world, dtype));
    group.reduce(mine, root).wait();
    const at::Tensor expected =
        world.rank() == root ? combined(values_of_all(world, size), ReduceOp::Sum) : own;
    expect_equal("reduce of " + what, mine, expected.to(dtype));
  });
}

void broadcast(const World& world, const Group& group) {
  everywhere(group, [&](at::ScalarType dtype, int64_t size, const std::string& what) {
    const int root = world.size() - 1;
    const at::Tensor mine = values(world.rank(), size).to(on(world, dtype));
    group.broadcast(mine, root).wait();
    expect_equal("broadcast of " + what, mine, values(root, size).to(dtype));
  });
}

void all_gather(const World& world, const Group& group) {
  everywhere(group, [&](at::ScalarType dtype, int64_t size, const std::string& what) {
    const at::Tensor mine = values(world.rank(), size).to(on(world, dtype));
    const at::Tensor out = at::zeros({size * world.size()}, on(world, dtype));
    group.all_gather(out, mine).wait();
    expect_equal("all_gather of " + what, out, at::cat(values_of_all(world, size)).to(dtype));
  });
}

void reduce_scatter(const World& world, const Group& group) {
  everywhere(group, [&](at::ScalarType dtype, int64_t size, const std::string& what) {
    const int64_t whole = size * world.size();
    const at::Tensor in = values(world.rank(), whole).to(on(world, dtype));
    const at::Tensor out = at::zeros({size}, on(world, dtype));
    group.reduce_scatter(out, in).wait();
    const at::Tensor sum = combined(values_of_all(world, whole), ReduceOp::Sum);
    expect_equal("reduce_scatter of " + what, out,
                 sum.narrow(0, world.rank() * size, size).to(dtype));
  });
}

void all_to_all(const World& world, const Group& group) {
  everywhere(group, [&](at::ScalarType dtype, int64_t size, const std::string& what) {
    const int64_t whole = size * world.size();
    const at::Tensor in = values(world.rank(), whole).to(on(world, dtype));
    const at::Tensor out = at::zeros({whole}, on(world, dtype));
    group.all_to_all(out, in).wait();
    std::vector<at::Tensor> parts;
    for (const auto& all : values_of_all(world, whole))
      parts.push_back(all.narrow(0, world.rank() * size, size));
    expect_equal("all_to_all of " + what, out, at::cat(parts).to(dtype));
  });
}

// Each rank has another count.
void unequal(const World& world, const Group& group) {
  const int n = world.size();
  const auto count = [](int rank) { return int64_t{100} + 7 * rank; };
  std::vector<at::Tensor> out, parts;
  for (int rank = 0; rank < n; ++rank) {
    out.push_back(at::zeros({count(rank)}, on(world, at::kFloat)));
    parts.push_back(values(world.rank(), count(rank)).to(on(world, at::kFloat)));
  }
  const at::Tensor mine = values(world.rank(), count(world.rank())).to(on(world, at::kFloat));
  group.all_gather(out, mine).wait();
  for (int rank = 0; rank < n; ++rank)
    expect_equal("all_gather of a list", out[rank], values(rank, count(rank)).to(at::kFloat));
  const at::Tensor part = at::zeros_like(mine);
  group.reduce_scatter(part, parts).wait();
  const at::Tensor sum = combined(values_of_all(world, count(world.rank())), ReduceOp::Sum);
  expect_equal("reduce_scatter of a list", part, sum.to(at::kFloat));
}

void strided(const World& world, const Group& group) {
  const at::Tensor mine =
      values(world.rank(), 60 * 40).view({60, 40}).to(on(world, at::kFloat)).t();
  group.all_reduce(mine).wait();
  const at::Tensor sum = combined(values_of_all(world, 60 * 40), ReduceOp::Sum);
  expect_equal("all_reduce of a transposed tensor", mine.t(), sum.view({60, 40}).to(at::kFloat));
}

void messages(const World& world, const Group& group) {
  const int n = world.size(), next = (world.rank() + 1) % n, last = (world.rank() + n - 1) % n;
  for (const int64_t size : sizes()) {
    const at::Tensor in = values(world.rank(), size).to(on(world, at::kFloat));
    const at::Tensor out = at::zeros_like(in);
    if (n == 1) {
      group.send_recv(out, in, {.to = 0, .from = 0}).wait();
    } else {
      auto sent = group.send(in, next);
      auto received = group.recv(out, last);
      sent.wait();
      received.wait();
    }
    expect_equal("a message", out, values(last, size).to(at::kFloat));
  }
}

// More at once than a lane, and a kernel's arguments, have room for.
void many_messages(const World& world, const Group& group) {
  const int n = world.size(), next = (world.rank() + 1) % n, last = (world.rank() + n - 1) % n;
  if (n == 1) return;
  for (const auto& [count, size] : {std::pair<int, int64_t>{33, 140'000}, {100, 1001}}) {
    std::vector<comm::Work> works;
    std::vector<at::Tensor> out;
    for (int i = 0; i < count; ++i)
      works.push_back(
          group.send(values(world.rank(), size).add(i).to(on(world, at::kFloat)), next));
    for (int i = 0; i < count; ++i) {
      out.push_back(at::zeros({size}, on(world, at::kFloat)));
      works.push_back(group.recv(out.back(), last));
    }
    comm::wait_all(works);
    for (int i = 0; i < count; ++i)
      expect_equal("one of many messages", out[static_cast<size_t>(i)],
                   values(last, size).add(i).to(at::kFloat));
  }
}

// Work that keeps a device busy for some milliseconds.
at::Tensor busy(const World& world, at::Tensor start) {
  const int64_t width = world.device().is_cpu() ? 64 : 2048;
  at::Tensor x = at::eye(width, on(world, at::kFloat));
  for (int i = 0; i < 20; ++i) x = at::mm(x, x);
  return start + x.sum() * 0;
}

// What the caller enqueues before a call is in it, and what it enqueues after wait() sees it, on
// whichever stream.
void streams(const World& world, const Group& group) {
  const auto n = static_cast<double>(world.size());
  const c10::impl::VirtualGuardImpl device(world.device().type());
  for (const bool other : {false, true}) {
    const c10::Stream stream = other && !world.device().is_cpu()
                                   ? device.getStreamFromGlobalPool(world.device())
                                   : device.getStream(world.device());
    const c10::StreamGuard guard(stream);
    const at::Tensor data = busy(world, at::zeros({100'000}, on(world, at::kFloat)));
    data.fill_(world.rank() + 1);
    group.all_reduce(data).wait();
    const at::Tensor after = data * 2;
    expect_equal("what follows wait()", after, at::full({100'000}, n * (n + 1), at::kFloat));
  }
}

// The caller lets go of a tensor at once, and its memory is wanted for others.
void lifetimes(const World& world, const Group& group) {
  std::vector<comm::Work> works;
  const auto n = static_cast<float>(world.size());
  std::vector<at::Tensor> results;
  for (int i = 0; i < 20; ++i) {
    at::Tensor out = at::zeros({50'000 * world.size()}, on(world, at::kFloat));
    {
      const at::Tensor in =
          busy(world, at::full({50'000}, static_cast<float>(i), on(world, at::kFloat)));
      works.push_back(group.all_gather(out, in));
    }
    const at::Tensor fresh = at::full({50'000}, -1.0f, on(world, at::kFloat));
    results.push_back(out);
  }
  for (auto& work : works) work.wait();
  for (size_t i = 0; i < results.size(); ++i) {
    expect_close("a gathered sum", results[i].sum().cpu(),
                 at::scalar_tensor(50'000.0f * n * static_cast<float>(i), at::kFloat), 1);
  }
}

void groups(const World& world, const Group& group) {
  const Group halves = group.split(world.rank() % 2, world.rank());
  const at::Tensor mine = at::full({1000}, 1.0f, on(world, at::kFloat));
  halves.all_reduce(mine).wait();
  halves.barrier().wait();
  expect_equal("a sum over a part of the ranks", mine,
               at::full({1000}, static_cast<float>(halves.size()), at::kFloat));
}

// Groups whose kernels are under way at the same time have to find room beside each other, in
// whichever order they come.
void groups_at_once(const World& world, const Group& group) {
  const int rank = world.rank();
  const std::vector<Group> all{group, group.split(rank / 2, rank), group.split(rank % 2, rank),
                               group.split(0, rank)};
  const bool turned = group.backend() == "cuda_ipc" && rank % 2 == 1;
  std::vector<at::Tensor> data;
  for (size_t i = 0; i < all.size(); ++i)
    data.push_back(at::zeros({1'000'000}, on(world, at::kFloat)));
  const int repeats = world.device().is_cpu() ? 2 : 20;
  for (int repeat = 0; repeat < repeats; ++repeat) {
    for (const auto& each : data) each.fill_(1);
    std::vector<comm::Work> works;
    for (size_t i = 0; i < all.size(); ++i) {
      const size_t at = turned ? all.size() - 1 - i : i;
      works.push_back(all[at].all_reduce(data[at]));
    }
    comm::wait_all(works);
    for (size_t i = 0; i < all.size(); ++i)
      expect_equal("a sum beside others", data[i].mean(),
                   at::scalar_tensor(static_cast<float>(all[i].size()), at::kFloat));
  }
}

}  // namespace

std::vector<Check> collective_checks(const Group& group) {
  using Body = void (*)(const World&, const Group&);
  std::vector<Check> checks;
  for (const auto& [name, body] : std::initializer_list<std::pair<std::string_view, Body>>{
           {"all_reduce", all_reduce},
           {"average", average},
           {"same_bits", same_bits},
           {"in_shared_memory", in_shared_memory},
           {"reduce", reduce},
           {"broadcast", broadcast},
           {"all_gather", all_gather},
           {"reduce_scatter", reduce_scatter},
           {"all_to_all", all_to_all},
           {"unequal_counts", unequal},
           {"strided", strided},
           {"messages", messages},
           {"many_messages", many_messages},
           {"streams", streams},
           {"lifetimes", lifetimes},
           {"split", groups},
           {"groups_at_once", groups_at_once}}) {
    checks.push_back({name, [body, group](const World& world) { body(world, group); }});
  }
  return checks;
}

}  // namespace lockstep::on_gpu
