#include "random/training/check.h"

#include <fmt/format.h>
#include <torch/torch.h>

#include <algorithm>
#include <sstream>
#include <string_view>

#include "lockstep/core/error.h"
#include "random/training/features.h"

namespace lockstep::test::training {
namespace {

constexpr std::string_view kNoGradient = "parameters got no gradient in backward()";

std::string bytes_of(const State& state) {
  std::vector<at::Tensor> tensors;
  for (const auto& [name, tensor] : state) {
    tensors.push_back(tensor.defined() ? tensor.detach().clone().contiguous()
                                       : torch::empty({0, 7}, at::kBool));
  }
  std::ostringstream out;
  torch::save(tensors, out);
  return out.str();
}

State state_from(const std::string& bytes, const State& names) {
  std::istringstream in(bytes);
  std::vector<at::Tensor> tensors;
  torch::load(tensors, in);
  State state;
  for (size_t i = 0; i < tensors.size(); ++i) {
    const bool undefined = tensors[i].scalar_type() == at::kBool && tensors[i].dim() == 2;
    state.emplace_back(names.at(i).first, undefined ? at::Tensor() : tensors[i]);
  }
  return state;
}

// FNV-1a over the bits of all elements.
std::string digest_of(const State& state) {
  uint64_t hash = 0xcbf29ce484222325U;
  const auto add = [&](const void* data, size_t size) {
    for (size_t i = 0; i < size; ++i) {
      hash = (hash ^ static_cast<const unsigned char*>(data)[i]) * 0x100000001b3U;
    }
  };
  for (const auto& [name, tensor] : state) {
    const bool defined = tensor.defined();
    add(&defined, sizeof defined);
    if (!defined) continue;
    // -0 equals 0, and one NaN another.
    auto values = tensor.detach().is_complex() ? at::view_as_real(tensor.detach().resolve_conj())
                                               : tensor.detach();
    if (values.is_floating_point()) {
      values = at::where(values.isnan(), at::full_like(values, 12345.0), values) + 0.0;
    }
    values = values.contiguous();
    add(values.const_data_ptr(), values.nbytes());
  }
  return fmt::format("{:016x}", hash);
}

// The roundings that may lie between two orders of the same computation.
double tolerance_of(const Program& program, at::ScalarType dtype) {
  const auto narrow = param_dtype_of(program);
  if (dtype == at::kBFloat16 || program.has("autocast") || program.has_layer("linear_bfloat16") ||
      narrow == at::kBFloat16)
    return 6e-2;
  if (dtype == at::kHalf || program.has_layer("linear_float16")) return 2e-2;
  if (dtype == at::kFloat || dtype == at::kComplexFloat || program.has_layer("linear_float32") ||
      program.has_layer("complex") || program.has("reduce_dtype") || narrow == at::kFloat) {
    // Fsdp averages each backward's gradients by themselves.
    return program.has("fsdp") ? 1e-4 : 1e-5;
  }
  return 1e-9;
}

std::string difference(const Program& program, const State& got, const State& want,
                       bool to_the_bit) {
  if (got.size() != want.size()) return "another number of tensors";
  for (size_t i = 0; i < got.size(); ++i) {
    const auto& [name, a] = got[i];
    const auto& b = want[i].second;
    if (a.defined() != b.defined()) {
      return fmt::format("{}: {}, want {}", name, a.defined() ? "there" : "undefined",
                         b.defined() ? "a tensor" : "none");
    }
    if (!a.defined()) continue;
    // An Fsdp's module may have parameters and buffers of another dtype than its shards.
    const bool is_narrowed = !to_the_bit && param_dtype_of(program).has_value();
    if (a.sizes() != b.sizes() || (a.scalar_type() != b.scalar_type() && !is_narrowed)) {
      return fmt::format("{}: another shape or dtype", name);
    }
    const double tolerance = to_the_bit ? 0 : tolerance_of(program, a.scalar_type());
    const auto wide = a.is_complex() ? at::kComplexDouble : at::kDouble;
    const auto x = a.to(wide), y = b.to(wide);
    if (at::allclose(x, y, tolerance, tolerance, /*equal_nan=*/true)) continue;
    const auto gap = (x - y).abs().reshape({-1}).nan_to_num(1e300, 1e300);
    const auto at = gap.numel() == 0 ? 0 : gap.argmax().item<int64_t>();
    const auto shown = [&](const at::Tensor& t) {
      return at::real(t.reshape({-1})[at].to(at::kComplexDouble)).item<double>();
    };
    return fmt::format("{}[{}] = {}, want {}", name, at, shown(x), shown(y));
  }
  return {};
}

State parameters_only(State state) {
  std::erase_if(state, [](const auto& item) {
    const std::string& name = item.first;
    return name == "losses" || name.ends_with(" gradient") || name.ends_with(" buffer");
  });
  return state;
}

// Of a rank's lanes it is their mean.
State without_losses(State state) {
  std::erase_if(state, [](const auto& item) { return item.first == "losses"; });
  return state;
}

State without_gradients(State state) {
  std::erase_if(state, [](const auto& item) { return item.first.ends_with(" gradient"); });
  return state;
}

std::string compare(const Program& program, const std::vector<State>& got) {
  switch (compared_with(program)) {
    case Compared::Ranks:
      for (size_t rank = 1; rank < got.size(); ++rank) {
        const auto text = difference(program, parameters_only(got[rank]), parameters_only(got[0]),
                                     /*to_the_bit=*/true);
        if (!text.empty()) return fmt::format("rank {} and rank 0 differ: {}", rank, text);
      }
      return {};
    case Compared::OneProcess:
      break;
  }
  const auto want = train(program, Group(), Who::AllRanks);
  for (size_t rank = 0; rank < got.size(); ++rank) {
    // A rank without a batch has no gradients that mean anything.
    if (program.lanes() > 0) {
      const auto text = difference(program, without_losses(got[rank]), without_losses(want[0]),
                                   /*to_the_bit=*/false);
      if (text.empty()) continue;
      return fmt::format("rank {} and one process with a replica for each lane differ: {}", rank,
                         text);
    }
    const bool whole = !program.has("join");
    const auto text = difference(program, whole ? got[rank] : without_gradients(got[rank]),
                                 whole ? want[rank] : without_gradients(want[rank]),
                                 /*to_the_bit=*/false);
    if (!text.empty()) return fmt::format("rank {} and one process differ: {}", rank, text);
  }
  if (!knows_only_samples(program)) return {};
  const auto whole = train(program, Group(), Who::WholeBatch).at(0);
  const auto text = difference(program, parameters_only(got[0]), parameters_only(whole),
                               /*to_the_bit=*/false);
  return text.empty() ? text : "rank 0 and one model on the whole batch differ: " + text;
}

// Of ranks some of which refused: all are to, where the one process finds that they have to.
std::string compare_refusals(const Program& program, const std::vector<std::string>& all) {
  const auto refused = std::ranges::count(all, "");
  if (refused < std::ssize(all)) {
    return fmt::format("{} of {} ranks refuse a parameter without a gradient", refused, all.size());
  }
  if (compared_with(program) != Compared::OneProcess) return {};
  try {
    train(program, Group(), Who::AllRanks);
  } catch (const Refused&) {
    return {};
  }
  return "ranks refuse a parameter without a gradient, and in one process each has one";
}

}  // namespace

Outcome run_on_rank(const Program& program, World& world) {
  const Group& group = world.group();
  State state;
  try {
    state = train(program, group, Who::Rank).at(0);
  } catch (const ConfigError& error) {
    const bool is_expected = program.has("unused_error");
    if (!is_expected || std::string_view(error.what()).find(kNoGradient) == std::string::npos)
      throw;
  }
  const auto all = group.all_gather_bytes(state.empty() ? "" : bytes_of(state));
  // The ranks take turns.
  const int judge = static_cast<int>(program.seed % static_cast<uint64_t>(group.size()));
  std::string error;
  if (group.rank() == judge && std::ranges::count(all, "") > 0) {
    error = compare_refusals(program, all);
  } else if (group.rank() == judge) {
    std::vector<State> states;
    for (const auto& bytes : all) states.push_back(state_from(bytes, state));
    try {
      error = compare(program, states);
    } catch (const Refused& refused) {
      error = fmt::format("is not refused: {}", refused.what());
    }
  }
  error = group.broadcast_bytes(error, judge);
  return {.good = error.empty(), .digest = digest_of(state), .error = error};
}

}  // namespace lockstep::test::training
