#include "lockstep/parallel/check_same.h"

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <torch/types.h>

#include <algorithm>
#include <bit>
#include <cstring>
#include <iterator>
#include <unordered_map>

#include "lockstep/core/error.h"
#include "lockstep/core/flight.h"
#include "parallel/ddp/consistency/compare_ranks.h"
#include "parallel/ddp/consistency/fingerprint.h"
#include "parallel/optim/optimizer_pieces.h"

namespace lockstep::parallel {
namespace {

enum class Foreign : uint8_t { Skip, Include };

constexpr std::string_view kOrder =
    "the order in which a Loader or sampler divides the samples (its seed, shuffle or number of "
    "samples)";

// Names and fingerprints, in an order that all ranks have.
struct Inventory {
  std::vector<std::string> names;
  std::vector<uint64_t> prints;
  std::vector<data::DividedOrder> orders;  // their print is the first

  void add(std::string name, uint64_t print) {
    names.push_back(std::move(name));
    prints.push_back(print);
  }
  void add(const Model& model);
  // `foreign`: also the state of parameters that the model does not have.
  void add(const Model& model, const torch::optim::Optimizer& optimizer, Foreign foreign);
  bool has_orders() const { return !names.empty() && names[0] == kOrder; }
  std::string_view bytes() const {
    return {reinterpret_cast<const char*>(prints.data()), prints.size() * sizeof(uint64_t)};
  }
};

void Inventory::add(const Model& model) {
  for (const auto& item : model.parameters) {
    add(fmt::format("parameter '{}'", item.name), fingerprint(item.tensor));
  }
  for (const auto& item : model.buffers) {
    add(fmt::format("buffer '{}'", item.name), fingerprint(item.tensor));
  }
}

void Inventory::add(const Model& model, const torch::optim::Optimizer& optimizer, Foreign foreign) {
  std::unordered_map<const void*, std::string> names_of;
  for (const auto& item : model.parameters) {
    names_of.try_emplace(item.tensor.unsafeGetTensorImpl(), "'" + item.name + "'");
  }
  for (size_t g = 0; g < optimizer.param_groups().size(); ++g) {
    const auto& group = optimizer.param_groups()[g];
    add(fmt::format("the optimizer's options of group {} (learning rate {})", g,
                    group.options().get_lr()),
        fingerprint(bytes_of(group.options())));
    for (size_t i = 0; i < group.params().size(); ++i) {
      const void* key = group.params()[i].unsafeGetTensorImpl();
      const auto state = optimizer.state().find(const_cast<void*>(key));
      const auto name = names_of.find(key);
      if (foreign == Foreign::Skip && name == names_of.end()) continue;
      const std::string of =
          name != names_of.end() ? name->second : fmt::format("{} of group {}", i, g);
      uint64_t print = 0;
      std::vector<std::string> pieces;
      if (state != optimizer.state().end()) {
        for (const auto& piece : pieces_of(*state->second)) {
          pieces.push_back(piece.name);
          print = print * 31 + fingerprint(piece.name) + fingerprint(piece.tensor);
        }
      }
      add(fmt::format("the optimizer's state ({}) of parameter {}",
                      pieces.empty() ? "none here" : fmt::format("{}", fmt::join(pieces, ", ")),
                      of),
          print);
    }
  }
}

using Orders = std::vector<data::DividedOrder>;

std::string_view bytes_of(const Orders& orders) {
  return {reinterpret_cast<const char*>(orders.data()), orders.size() * sizeof(data::DividedOrder)};
}

Inventory inventory_of(const Orders& orders, const Group& group) {
  Inventory mine;
  mine.orders = orders;
  for (auto& order : mine.orders) {
    // Several groups of ranks may have a set each.
    if (order.parts < group.size()) order.length = 0;
    order.parts = 0;
  }
  std::ranges::sort(mine.orders);
  const auto [end, last] = std::ranges::unique(mine.orders);
  mine.orders.erase(end, last);
  mine.add(std::string(kOrder), fingerprint(bytes_of(mine.orders)));
  return mine;
}

template <typename Ranks>
std::string differing(const Ranks& ranks) {
  return ranks.size() == 1 ? fmt::format("rank {} differs", ranks[0])
                           : fmt::format("ranks {} differ", fmt::join(ranks, ", "));
}

// Those of `mine` that are not among `others`.
Orders only_in(const Orders& mine, const Orders& others) {
  Orders only;
  std::ranges::set_difference(mine, others, std::back_inserter(only));
  return only;
}

// The sentence of two ranks that do not divide the same samples; empty without any. Orders are
// compared by each two ranks, so that all ranks write the same.
std::string difference_of_orders(const Orders& mine, const Group& group) {
  std::vector<Orders> by_rank;
  for (const auto& bytes :
       group.all_gather_bytes(bytes_of(mine), {.label = "check_same: orders"})) {
    by_rank.emplace_back(bytes.size() / sizeof(data::DividedOrder));
    if (!bytes.empty()) std::memcpy(by_rank.back().data(), bytes.data(), bytes.size());
  }
  for (size_t first = 0; first < by_rank.size(); ++first) {
    std::vector<size_t> others;
    std::string texts;
    for (size_t rank = first + 1; rank < by_rank.size(); ++rank) {
      const Orders there = only_in(by_rank[first], by_rank[rank]);
      const Orders here = only_in(by_rank[rank], by_rank[first]);
      if (there.empty() || here.empty()) continue;
      if (others.empty()) {
        texts = fmt::format("{} on rank {}, {} on rank {}", data::text_of(there[0]), first,
                            data::text_of(here[0]), rank);
      }
      others.push_back(rank);
    }
    if (others.empty()) continue;
    return fmt::format("{} from rank {} ({} ranks), first in {}: {}", differing(others), first,
                       group.size(), kOrder, texts);
  }
  return {};
}

// The sentence of what differs; empty when nothing does.
std::string difference(const Inventory& mine, const Group& group) {
  const uint64_t all = fingerprint(mine.bytes());
  at::Tensor prints = at::empty({group.size()}, at::kLong);
  group
      .all_gather(prints, at::scalar_tensor(std::bit_cast<int64_t>(all), at::kLong),
                  {.label = "check_same"})
      .wait();
  if ((prints == prints[0]).all().item<bool>()) return {};

  std::vector<std::vector<uint64_t>> by_rank;
  for (const auto& bytes : group.all_gather_bytes(mine.bytes(), {.label = "check_same: details"})) {
    std::vector<uint64_t> theirs(bytes.size() / sizeof(uint64_t));
    std::memcpy(theirs.data(), bytes.data(), bytes.size());
    by_rank.push_back(std::move(theirs));
  }
  const auto same = [&](const auto& theirs) { return theirs == by_rank[0]; };
  const auto same_orders = [&](const auto& theirs) { return theirs[0] == by_rank[0][0]; };
  if (mine.has_orders() && !std::ranges::all_of(by_rank, same_orders)) {
    if (auto text = difference_of_orders(mine.orders, group); !text.empty()) return text;
    for (auto& theirs : by_rank) theirs[0] = 0;
    if (std::ranges::all_of(by_rank, same)) return {};
  }
  // Rank 0 writes the sentence, so that all ranks throw the same.
  const auto [first, ranks] = [&] {
    size_t index = SIZE_MAX;
    std::vector<int> others;
    for (size_t rank = 1; rank < by_rank.size(); ++rank) {
      if (by_rank[rank] == by_rank[0]) continue;
      others.push_back(static_cast<int>(rank));
      size_t i = 0;
      while (i < by_rank[0].size() && i < by_rank[rank].size() && by_rank[rank][i] == by_rank[0][i])
        ++i;
      index = std::min(index, i);
    }
    return std::pair(index, others);
  }();
  const std::string name = group.broadcast_bytes(
      first < mine.names.size() ? mine.names[first] : "the number of parameters and buffers", 0,
      {.label = "check_same: name"});
  return fmt::format("{} from rank 0 ({} ranks), first in {}", differing(ranks), group.size(),
                     name);
}

void compare(const Inventory& mine, const Group& group, std::string_view when) {
  const std::string text = difference(mine, group);
  // Of orders alone that are the same there is nothing to note.
  if (!text.empty() || !mine.has_orders() || mine.names.size() > 1) {
    flight::note_comparison(
        fmt::format("{}: {}", when, text.empty() ? "the ranks are the same" : text));
  }
  if (text.empty()) return;
  if (text.find(kOrder) != std::string::npos) {
    throw ConfigError(fmt::format(
        "[check_same] {}: {}: some samples come twice and some never. Give all ranks the same",
        when, text));
  }
  throw ConfigError(
      fmt::format("[check_same] {}: the ranks' models have diverged: {}. Likely causes: only one "
                  "rank loaded a checkpoint (use broadcast_optimizer), decided by its own loss, "
                  "drew other random numbers, or wrote to a parameter (a forward that gives "
                  "parameters their first values from its batch goes before the Ddp; where each "
                  "rank perturbs them for its own backward(), see DdpOptions::check_same_every)",
                  when, text));
}

constexpr std::string_view kCall = "a call of check_same()";

}  // namespace

void compare_ranks(const Model& model, const torch::optim::Optimizer* optimizer, const Group& group,
                   std::string_view when, const Orders& orders) {
  Inventory mine = inventory_of(orders, group);
  mine.add(model);
  if (optimizer != nullptr) mine.add(model, *optimizer, Foreign::Skip);
  compare(mine, group, when);
}

void compare_orders(const Group& group, std::string_view when, const Orders& orders) {
  if (group.size() > 1) compare(inventory_of(orders, group), group, when);
}

void check_same(const ModuleRef& module, const Group& group) {
  if (group.size() == 1) return;
  group.refuse_python_ranks("check_same()");
  Inventory mine;
  mine.add(Model::of(module));
  compare(mine, group, kCall);
}

void check_same(const ModuleRef& module, const torch::optim::Optimizer& optimizer,
                const Group& group) {
  if (group.size() == 1) return;
  group.refuse_python_ranks("check_same()");
  const Model model = Model::of(module);
  Inventory mine;
  mine.add(model);
  mine.add(model, optimizer, Foreign::Include);
  compare(mine, group, kCall);
}

}  // namespace lockstep::parallel
