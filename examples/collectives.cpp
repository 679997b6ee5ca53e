// A tour: each collective on tensors of a few numbers, and what every rank has afterwards.
//   lockstep run --nproc-per-node 2 collectives
#include <lockstep/lockstep.h>
#include <torch/torch.h>

#include <cstdio>
#include <sstream>

#include "program.h"

namespace {

using lockstep::Group;
using lockstep::ReduceOp;
using lockstep::World;

// Rank 0 prints what each rank holds.
void show(const Group& group, const char* what, const torch::Tensor& mine) {
  std::ostringstream text;
  for (int64_t i = 0; i < mine.numel(); ++i) text << " " << mine[i].item<float>();
  const auto ranks = group.gather_bytes(text.str());
  for (size_t r = 0; r < ranks.size(); ++r) {
    std::printf("%-22s rank %zu:%s\n", r == 0 ? what : "", r, ranks[r].c_str());
  }
}

void tour(const World& world) {
  const Group& group = world.group();
  const int rank = world.rank(), size = world.size();
  const torch::Tensor mine = torch::tensor({rank + 1.0F, 10.0F * (rank + 1)});
  show(group, "at the start", mine);

  torch::Tensor sum = mine.clone();
  group.all_reduce(sum).wait();
  show(group, "all_reduce", sum);

  torch::Tensor largest = mine.clone();
  group.all_reduce(largest, ReduceOp::Max).wait();
  show(group, "all_reduce max", largest);

  torch::Tensor first = mine.clone();
  group.broadcast(first, 0).wait();
  show(group, "broadcast from 0", first);

  torch::Tensor everything = torch::empty({2 * size});
  group.all_gather(everything, mine).wait();
  show(group, "all_gather", everything);

  torch::Tensor part = torch::empty({2});
  group.reduce_scatter(part, everything).wait();
  show(group, "reduce_scatter of that", part);

  torch::Tensor turned = torch::empty({size});
  group.all_to_all(turned, torch::arange(size, torch::kFloat) + 100.0F * rank).wait();
  show(group, "all_to_all", turned);

  // Rank 0 deals out parts of its own; the others name no inputs.
  std::vector<torch::Tensor> parts;
  for (int r = 0; rank == 0 && r < size; ++r) parts.push_back(torch::full({1}, 7.0F * r));
  torch::Tensor dealt = torch::empty({1});
  group.scatter(dealt, parts).wait();
  show(group, "scatter from 0", dealt);

  // Each to the next in a ring, and from the one before it. Started first, waited for later.
  torch::Tensor received = torch::empty({2});
  if (size > 1) {
    auto sending = group.send(mine, (rank + 1) % size);
    group.recv(received, (rank + size - 1) % size).wait();
    sending.wait();
  } else {
    received.copy_(mine);
  }
  show(group, "send to the next", received);

  // Tensors in the group's own memory need no copies; a Work can be left to run meanwhile.
  torch::Tensor shared = group.empty({2}, torch::kFloat);
  shared.fill_(1);
  auto work = group.all_reduce(shared, ReduceOp::Sum, {.label = "in place"});
  work.wait();
  show(group, "in group memory", shared);

  const Group half = group.split(rank % 2);
  torch::Tensor within = mine.clone();
  half.all_reduce(within).wait();
  show(group, "even and odd ranks", within);

  group.barrier().wait();
  if (world.is_main()) std::printf("%s: done\n", world.describe().c_str());
}

}  // namespace

int main(int argc, char** argv) {
  CLI::App app("A tour of the collectives");
  return example::run(app, argc, argv, [] { tour(World::from_env()); });
}
