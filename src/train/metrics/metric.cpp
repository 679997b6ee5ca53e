#include "lockstep/train/metric.h"

#include <fmt/format.h>
#include <torch/torch.h>

#include <algorithm>

#include "lockstep/checkpoint/error.h"
#include "lockstep/checkpoint/stateful.h"
#include "lockstep/core/error.h"

namespace lockstep::train {
namespace {

using checkpoint::Held;
using checkpoint::Names;
using checkpoint::Piece;
using checkpoint::Saved;
using checkpoint::State;

// How much a rank has, and what is wrong with it.
std::string header_of(const MetricState& state) {
  return fmt::format("{} {} {}", state.sums.size(), state.rows.size(), state.fault);
}

struct Header {
  size_t sums = 0;
  size_t rows = 0;
  std::string fault;
};

Header header_of(const std::string& text) {
  const size_t first = text.find(' '), second = text.find(' ', first + 1);
  return {std::stoul(text.substr(0, first)), std::stoul(text.substr(first + 1, second - first - 1)),
          text.substr(second + 1)};
}

template <class T>
at::Tensor over(std::vector<T>& values, at::ScalarType dtype) {
  return at::from_blob(values.data(), {static_cast<int64_t>(values.size())}, dtype);
}

// All of it as one tensor, whose lengths come first.
at::Tensor packed(const MetricState& counts) {
  const at::Tensor lengths = at::tensor(
      {static_cast<int64_t>(counts.sums.size()), static_cast<int64_t>(counts.rows.size())},
      at::kLong);
  const auto* text = reinterpret_cast<const uint8_t*>(counts.fault.data());
  const at::Tensor fault =
      at::tensor(std::vector<uint8_t>(text, text + counts.fault.size()), at::kByte).to(at::kLong);
  return at::cat({lengths, at::tensor(counts.sums, at::kLong),
                  at::tensor(counts.rows, at::kDouble).view(at::kLong), fault});
}

MetricState unpacked(const at::Tensor& all) {
  const int64_t sums = all[0].item<int64_t>(), rows = all[1].item<int64_t>();
  if (sums < 0 || rows < 0 || sums > all.numel() - 2 || rows > all.numel() - 2 - sums) {
    throw CheckpointError("[metric] the saved counts are of no metric");
  }
  const auto* number = all.const_data_ptr<int64_t>() + 2;
  MetricState counts;
  counts.sums.assign(number, number + sums);
  const at::Tensor values = all.slice(0, 2 + sums, 2 + sums + rows).view(at::kDouble);
  counts.rows.assign(values.const_data_ptr<double>(), values.const_data_ptr<double>() + rows);
  for (int64_t i = sums + rows; i < all.numel() - 2; ++i) {
    counts.fault += static_cast<char>(number[i]);
  }
  return counts;
}

class CountsOfRank : public checkpoint::Stateful {
 public:
  CountsOfRank(Metric& metric, const Group& group) : metric_(metric), group_(group) {}

  State state(const Names&) const override {
    return {.pieces = {piece(group_.rank(), packed(metric_.state()))},
            .values = {{kKind, metric_.kind()}}};
  }

  State destination(const Saved& saved, const Names&) override {
    next_.clear();
    State state{.others = {"rank-*"}};
    is_missing_ = saved.tensors.empty();
    if (is_missing_) return this->state({});  // whose pieces the caller finds missing
    if (saved.values.contains(kKind)) {       // not in those of before 0.1.0
      const auto kind = checkpoint::value_of<std::string>(saved.values, kKind);
      if (kind != metric_.kind()) {
        throw CheckpointError(fmt::format("[{}] the saved counts are those of {}, and this is {}",
                                          metric_.name(), kind, metric_.kind()));
      }
      state.values = {{kKind, kind}};
    }
    for (int64_t rank = group_.rank(); rank < saved.world; rank += group_.size()) {
      const auto found = saved.tensors.find(name_of(rank));
      if (found == saved.tensors.end()) continue;
      next_.push_back(at::empty(found->second.sizes, at::kLong));
      state.pieces.push_back(piece(rank, next_.back()));
    }
    return state;
  }

  void restored(const State&) override {
    if (is_missing_) return;  // which was allowed
    metric_.reset();
    for (const at::Tensor& part : next_) metric_.add(unpacked(part));
    next_.clear();
  }

 private:
  static constexpr const char* kKind = "kind";

  static std::string name_of(int64_t rank) { return fmt::format("rank-{}", rank); }
  static Piece piece(int64_t rank, const at::Tensor& counts) {
    Piece piece = checkpoint::whole_piece(name_of(rank), counts);
    piece.held = Held::InParts;
    return piece;
  }

  Metric& metric_;
  Group group_;
  // Between destination() and restored(): of each saved part; and whether there is none.
  std::vector<at::Tensor> next_;
  bool is_missing_ = false;
};

}  // namespace

void Metric::note_fault(int64_t sample, std::string_view what) {
  if (state_.fault.empty()) {
    state_.fault = fmt::format("sample {} of batch {}: {}", sample, updates_ - 1, what);
  }
}

void Metric::add(const MetricState& state) {
  if (!state.kind.empty() && state.kind != kind()) {
    throw ConfigError(fmt::format("[{}] counts of {} cannot be added to those of {}", name(),
                                  state.kind, kind()));
  }
  if (!state.sums.empty() && !state_.sums.empty() && state.sums.size() != state_.sums.size()) {
    throw ConfigError(fmt::format("[{}] counts of {} numbers cannot be added to {}", name(),
                                  state.sums.size(), state_.sums.size()));
  }
  if (state_.kind.empty()) state_.kind = kind();
  state_.sums.resize(std::max(state_.sums.size(), state.sums.size()));
  for (size_t i = 0; i < state.sums.size(); ++i) state_.sums[i] += state.sums[i];
  state_.rows.insert(state_.rows.end(), state.rows.begin(), state.rows.end());
  if (state_.fault.empty()) state_.fault = state.fault;
}

MetricState Metric::total(const Group& group) const {
  group.refuse_python_ranks("Metric");
  std::vector<Header> headers;
  const std::string label = "metric " + name();
  for (const auto& text : group.all_gather_bytes(header_of(state_), {.label = label})) {
    headers.push_back(header_of(text));
  }
  size_t sums = 0;
  for (size_t rank = 0; rank < headers.size(); ++rank) {
    const Header& header = headers[rank];
    if (!header.fault.empty()) {
      throw DataError(fmt::format("[{}] rank {}, {}", name(), rank, header.fault));
    }
    if (header.sums != 0 && sums != 0 && header.sums != sums) {
      throw ConfigError(
          fmt::format("[{}] rank {} has counted {} numbers where others have counted {}: all need "
                      "outputs of as many classes or columns",
                      name(), rank, header.sums, sums));
    }
    sums = std::max(sums, header.sums);
  }
  const bool has_rows = std::ranges::any_of(headers, [](const auto& of) { return of.rows > 0; });
  if (sums == 0 && !has_rows) {
    throw DataError(
        fmt::format("[{}] there is nothing to compute: no rank has had a sample since "
                    "the last reset()",
                    name()));
  }
  MetricState total = state_;
  total.sums.resize(sums);
  if (group.size() == 1) return total;
  if (sums > 0) {
    group.all_reduce(over(total.sums, at::kLong), ReduceOp::Sum, {.label = label}).wait();
  }
  size_t rows = 0;
  for (const Header& header : headers) rows += header.rows;
  if (rows == 0) return total;
  total.rows.resize(rows);
  const at::Tensor all = over(total.rows, at::kDouble);
  std::vector<at::Tensor> parts;
  int64_t begin = 0;
  for (const Header& header : headers) {
    parts.push_back(all.narrow(0, begin, static_cast<int64_t>(header.rows)));
    begin += static_cast<int64_t>(header.rows);
  }
  group.all_gather(parts, at::tensor(state_.rows, at::kDouble), {.label = label}).wait();
  return total;
}

std::map<std::string, double> Metric::values(const Group& group) const {
  return values_of(total(group));
}

double Metric::compute(const Group& group) const {
  const auto all = values(group);
  const auto own = all.find(name());
  if (own != all.end()) return own->second;
  throw ConfigError(fmt::format("[{}] values_of() gives no value of that name", name()));
}

std::shared_ptr<checkpoint::Stateful> stateful(Metric& metric, const Group& group) {
  return std::make_shared<CountsOfRank>(metric, group);
}

}  // namespace lockstep::train
