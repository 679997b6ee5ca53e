// `lockstep doctor`.
#pragma once

#include <CLI/CLI.hpp>

namespace lockstep::tool {

void add_doctor(CLI::App& program);

// Prints what it finds; returns 1 when something keeps jobs from running, otherwise 0.
int examine();

}  // namespace lockstep::tool
