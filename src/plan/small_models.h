// Profiles of the built-in models other than the transformer. Float32.
#pragma once

#include "lockstep/plan/model_profile.h"

namespace lockstep::plan {

ModelProfile linear_profile(const train::LinearConfig& model, const SampleSizes& sample);
ModelProfile mlp_profile(const train::MlpConfig& model, const SampleSizes& sample);
ModelProfile convnet_profile(const train::ConvnetConfig& model, const SampleSizes& sample);
ModelProfile resnet18_profile(const train::Resnet18Config& model, const SampleSizes& sample);

}  // namespace lockstep::plan
