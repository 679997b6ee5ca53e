// training.curriculum, the one key whose value is a list of groups.
#pragma once

#include <yaml-cpp/yaml.h>

#include <string>
#include <vector>

#include "lockstep/train/config.h"
#include "train/config/settings.h"

namespace lockstep::train {

constexpr const char* kCurriculum = "training.curriculum";

std::vector<CurriculumStage> read_curriculum(const Setting& setting, const std::string& file,
                                             Problems& problems);
// What is wrong with a stage; empty when nothing is.
std::string fault_of(const CurriculumStage& stage);
// As YAML, on one line.
std::string text_of(const std::vector<CurriculumStage>& stages);

}  // namespace lockstep::train
