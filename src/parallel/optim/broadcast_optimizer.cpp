#include <c10/core/InferenceMode.h>
#include <fmt/format.h>
#include <fmt/ranges.h>
#include <torch/serialize/archive.h>

#include <sstream>
#include <typeinfo>

#include "checkpoint/part_of.h"
#include "comm/together.h"
#include "lockstep/core/error.h"
#include "lockstep/parallel/check_same.h"
#include "lockstep/parallel/zero_optimizer.h"
#include "parallel/ddp/model.h"

namespace lockstep::parallel {
namespace {

// A rank that finds an error sends it instead of its description, so that all ranks throw it.
constexpr char kRefusal = '!';

std::string description(const torch::optim::Optimizer& optimizer) {
  if (dynamic_cast<const ZeroOptimizer*>(&optimizer) != nullptr) {
    return std::string(1, kRefusal) +
           "a ZeroOptimizer's state is sharded over the ranks: load() each rank's own part";
  }
  // load() casts to its own class without looking.
  std::string text = fmt::format("optimizer of class {}\n", typeid(optimizer).name());
  for (const auto& group : optimizer.param_groups()) {
    text += fmt::format("group of {} parameters:", group.params().size());
    for (const auto& parameter : group.params()) {
      if (checkpoint::part_of(parameter) != nullptr) {
        return std::string(1, kRefusal) +
               "the state of an Fsdp's shards differs from rank to rank: restore it by "
               "Checkpointer";
      }
      text += fmt::format(" [{}]", fmt::join(parameter.sizes(), ", "));
    }
    text += '\n';
  }
  return text;
}

void compare(const torch::optim::Optimizer& optimizer, const Group& group) {
  const auto texts =
      group.all_gather_bytes(description(optimizer), {.label = "broadcast_optimizer: comparing"});
  for (size_t rank = 0; rank < texts.size(); ++rank) {
    if (texts[rank].front() == kRefusal) {
      throw ConfigError(
          fmt::format("[broadcast_optimizer] rank {}: {}", rank, texts[rank].substr(1)));
    }
    if (texts[rank] != texts[0]) {
      throw ConfigError(fmt::format(
          "[broadcast_optimizer] the ranks' optimizers differ.\n  rank 0 has {}\n  rank {} has {}\n"
          "Construct the same one over the same parameters on every rank",
          texts[0], rank, texts[rank]));
    }
  }
}

}  // namespace

void broadcast_optimizer(torch::optim::Optimizer& optimizer, const Group& group) {
  const c10::InferenceMode normal(false);  // what is made here is trained outside of it, too
  if (group.size() == 1) return;
  group.refuse_python_ranks("broadcast_optimizer()");
  compare(optimizer, group);
  std::string bytes;
  comm::together(group, "broadcast_optimizer", [&] {
    if (group.rank() != 0) return;
    torch::serialize::OutputArchive archive;
    optimizer.save(archive);
    std::ostringstream stream;
    archive.save_to(stream);
    bytes = stream.str();
  });
  bytes = group.broadcast_bytes(bytes, 0, {.label = "broadcast_optimizer"});
  comm::together(group, "broadcast_optimizer", [&] {
    if (group.rank() == 0) return;
    torch::serialize::InputArchive archive;
    archive.load_from(bytes.data(), bytes.size());
    // load() keeps what the archive has nothing about.
    optimizer.state().clear();
    optimizer.load(archive);
  });
}

}  // namespace lockstep::parallel
