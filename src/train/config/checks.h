// Rules that are about several keys at once.
#pragma once

#include <functional>
#include <string>

#include "train/config/problems.h"
#include "train/config/schema.h"

namespace lockstep::train {

// Where a key's value was written.
using OriginOf = std::function<Origin(const std::string& path)>;
// Whether it was written at all.
using IsGiven = std::function<bool(const std::string& path)>;

void check_together(const Schema& schema, const RunConfig& config, const OriginOf& origin_of,
                    const IsGiven& is_given, Problems& problems);

}  // namespace lockstep::train
