// The features that random programs are composed of. A new one is a struct with `applies` and what
// it overrides of Feature, and a line in a table.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "random/training/training.h"

namespace lockstep::test::training {

// With what a feature's result is compared.
enum class Compared {
  OneProcess,  // with one process that does the same
  Ranks,  // communication loses something: with the other ranks, and other backends and buckets
};

struct FeatureKind {
  std::string name;
  // Whether it may be in a program that has these layers and features already.
  bool (*applies)(const Program&);
  std::unique_ptr<Feature> (*make)(const Part&);
  Compared compared = Compared::OneProcess;
  // Whether it does to a rank's part of a batch what it would do to the whole.
  bool splits = false;
};

enum class Splits { No, Yes };

template <class Kind>
FeatureKind feature(std::string name, Splits splits, Compared compared = Compared::OneProcess) {
  return {std::move(name), &Kind::applies,
          [](const Part& part) -> std::unique_ptr<Feature> { return std::make_unique<Kind>(part); },
          compared, splits == Splits::Yes};
}

// By topic, each in a file of its own.
void add_model_features(std::vector<FeatureKind>& kinds);
void add_data_features(std::vector<FeatureKind>& kinds);
void add_averaging_features(std::vector<FeatureKind>& kinds);
void add_communication_features(std::vector<FeatureKind>& kinds);
void add_failure_features(std::vector<FeatureKind>& kinds);
void add_gradient_features(std::vector<FeatureKind>& kinds);
void add_input_features(std::vector<FeatureKind>& kinds);
void add_lane_features(std::vector<FeatureKind>& kinds);
void add_lifetime_features(std::vector<FeatureKind>& kinds);
void add_memory_features(std::vector<FeatureKind>& kinds);
void add_module_features(std::vector<FeatureKind>& kinds);
void add_optimizer_features(std::vector<FeatureKind>& kinds);
void add_sharding_features(std::vector<FeatureKind>& kinds);

const std::vector<FeatureKind>& all_features();
std::vector<std::unique_ptr<Feature>> make_features(const Program& program);
Compared compared_with(const Program& program);
// Whether one model that sees the whole batch at once does the same: nothing in the program depends
// on which rank a sample is on.
bool knows_only_samples(const Program& program);

// A pair of names (features, layers or optimizers) that does not go together.
struct Conflict {
  std::string one, other;
  // What all ranks say where the library refuses it by name; else empty.
  std::string refusal;
  // Otherwise.
  std::string why;
};
const std::vector<Conflict>& conflicts();
// The same for what is not right yet. Is to be empty.
const std::vector<Conflict>& open_defects();

bool conflicts_with(const Program& program, std::string_view name);
// What all ranks throw for this program; empty when nothing.
std::string refusal_of(const Program& program);

}  // namespace lockstep::test::training
