#include "random/training/program.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <sstream>
#include <stdexcept>

namespace lockstep::test::training {
namespace {

std::string text_of(const std::vector<Part>& parts) {
  std::string text;
  for (const auto& part : parts) {
    text += fmt::format("{}{}:{}", text.empty() ? "" : ",", part.name, part.seed);
  }
  return text.empty() ? "-" : text;
}

std::vector<std::string> pieces_of(const std::string& text, char separator) {
  std::vector<std::string> pieces;
  if (text == "-") return pieces;
  std::istringstream in(text);
  for (std::string piece; std::getline(in, piece, separator);) pieces.push_back(piece);
  return pieces;
}

std::vector<Part> parts_of(const std::string& text) {
  std::vector<Part> parts;
  for (const auto& piece : pieces_of(text, ',')) {
    const auto colon = piece.find(':');
    parts.push_back({piece.substr(0, colon),
                     colon == std::string::npos ? 0 : std::stoull(piece.substr(colon + 1))});
  }
  return parts;
}

}  // namespace

uint64_t Random::next() {
  uint64_t z = state_ += 0x9e3779b97f4a7c15U;
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9U;
  z = (z ^ (z >> 27)) * 0x94d049bb133111ebU;
  return z ^ (z >> 31);
}

const Part* Program::feature(std::string_view name) const {
  const auto found = std::ranges::find(features, name, &Part::name);
  return found == features.end() ? nullptr : &*found;
}

bool Program::has(std::string_view name) const { return feature(name) != nullptr; }

int Program::lanes() const {
  const Part* const part = feature("lanes");
  return part == nullptr ? 0 : static_cast<int>(part->seed);
}

bool Program::has_layer(std::string_view prefix) const {
  return std::ranges::any_of(layers,
                             [&](const Part& layer) { return layer.name.starts_with(prefix); });
}

std::string Program::text() const {
  return fmt::format(
      "seed={} ranks={} backend={} hosts={} steps={} variant={} optimizer={} "
      "layers={} features={}",
      seed, ranks, backend, hosts.empty() ? "-" : fmt::format("{}", fmt::join(hosts, ",")), steps,
      variant, text_of({optimizer}), text_of(layers), text_of(features));
}

Program Program::parse(std::string_view text) {
  Program program;
  std::istringstream in{std::string(text)};
  for (std::string word; in >> word;) {
    const auto equals = word.find('=');
    const std::string key = word.substr(0, equals);
    const std::string value = equals == std::string::npos ? "" : word.substr(equals + 1);
    if (key == "seed") {
      program.seed = std::stoull(value);
    } else if (key == "ranks") {
      program.ranks = std::stoi(value);
    } else if (key == "backend") {
      program.backend = value;
    } else if (key == "hosts") {
      for (const auto& host : pieces_of(value, ',')) program.hosts.push_back(std::stoi(host));
    } else if (key == "steps") {
      program.steps = std::stoi(value);
    } else if (key == "variant") {
      program.variant = std::stoi(value);
    } else if (key == "optimizer") {
      program.optimizer = parts_of(value).at(0);
    } else if (key == "layers") {
      program.layers = parts_of(value);
    } else if (key == "features") {
      program.features = parts_of(value);
    } else {
      throw std::invalid_argument("a program has no " + key);
    }
  }
  return program;
}

}  // namespace lockstep::test::training
