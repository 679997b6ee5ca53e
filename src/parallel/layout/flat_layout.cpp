#include "parallel/layout/flat_layout.h"

#include <fmt/format.h>

#include <algorithm>
#include <nlohmann/json.hpp>

#include "core/divided_up.h"
#include "lockstep/core/error.h"

namespace lockstep::parallel {

FlatLayout::FlatLayout(at::ScalarType dtype, int64_t alignment)
    : dtype_(dtype), width_(static_cast<int64_t>(c10::elementSize(dtype))), alignment_(alignment) {
  if (alignment_ < width_ || alignment_ % width_ != 0) {
    throw ConfigError(
        fmt::format("[flat layout] an alignment of {} bytes for elements of {}: it must be a "
                    "multiple of that",
                    alignment_, width_));
  }
}

FlatLayout FlatLayout::packed(at::ScalarType dtype) {
  return {dtype, static_cast<int64_t>(c10::elementSize(dtype))};
}

size_t FlatLayout::add(std::string name, int64_t numel) {
  members_.push_back({.name = std::move(name), .numel = numel, .begin = numel_});
  const int64_t bytes = rounded_up(numel * width_, alignment_);
  numel_ += bytes / width_;
  return members_.size() - 1;
}

std::vector<int64_t> FlatLayout::cuts(int64_t parts, int64_t grid) const {
  std::vector<int64_t> cuts;
  for (int64_t part = 0; part < parts; ++part) {
    const int64_t wanted = Shard{part, parts}.of(numel_).begin;
    int64_t cut = 0;
    for (const auto& member : members_) {
      if (member.begin > wanted) break;
      cut = member.begin + std::min((wanted - member.begin) / grid * grid, member.numel);
    }
    cuts.push_back(cut);
  }
  cuts.push_back(numel_);
  return cuts;
}

std::vector<FlatLayout::Portion> FlatLayout::portions(const Range& range) const {
  std::vector<Portion> found;
  for (size_t i = 0; i < members_.size(); ++i) {
    const auto& [name, numel, begin] = members_[i];
    const Range inside{std::max(range.begin, begin) - begin,
                       std::min(range.end, begin + numel) - begin};
    if (inside.begin < inside.end) found.push_back({i, inside});
  }
  return found;
}

std::string FlatLayout::text() const {
  auto members = nlohmann::json::array();
  for (const auto& member : members_) members.push_back({member.name, member.numel});
  return nlohmann::json{
      {"dtype", static_cast<int>(dtype_)}, {"alignment", alignment_}, {"members", members}}
      .dump();
}

FlatLayout FlatLayout::parse(std::string_view text) {
  const ConfigError refusal(fmt::format("[flat layout] '{}' is not the text of a layout", text));
  try {
    const auto all = nlohmann::json::parse(text);
    const auto dtype = all.at("dtype").get<int>();
    if (dtype < 0 || dtype >= static_cast<int>(at::ScalarType::Undefined)) throw refusal;
    FlatLayout layout(static_cast<at::ScalarType>(dtype), all.at("alignment").get<int64_t>());
    for (const auto& member : all.at("members")) {
      if (member.at(1).get<int64_t>() < 0) throw refusal;
      layout.add(member.at(0).get<std::string>(), member.at(1).get<int64_t>());
    }
    return layout;
  } catch (const nlohmann::json::exception&) {
    throw refusal;
  }
}

}  // namespace lockstep::parallel
