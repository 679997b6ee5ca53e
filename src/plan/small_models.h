// Profiles of the built-in models other than the transformer. Narrow: under Autocast, which
// keeps losses and statistics of normalisations in float32.
#pragma once

#include "lockstep/plan/model_profile.h"

namespace lockstep::plan {

ModelProfile linear_profile(const train::LinearConfig& model, const SampleSizes& sample,
                            Precision precision);
ModelProfile mlp_profile(const train::MlpConfig& model, const SampleSizes& sample,
                         Precision precision);
ModelProfile convnet_profile(const train::ConvnetConfig& model, const SampleSizes& sample,
                             Precision precision);
ModelProfile resnet18_profile(const train::Resnet18Config& model, const SampleSizes& sample,
                              Precision precision);

}  // namespace lockstep::plan
