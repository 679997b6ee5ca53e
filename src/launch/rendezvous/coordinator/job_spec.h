// Describes how the job specifications of two hosts differ.
#pragma once

#include <string>
#include <vector>

#include "launch/rendezvous/network/message.h"

namespace lockstep::launch {

// Sets the command of the job_spec, so that a host that runs another one is refused: the name of
// the program without its folder, and the arguments.
void set_command(JobSpec& job_spec, const std::vector<std::string>& command);

// "--max-restarts 3 and --grace 2", the options in which it differs from `other`. Called with the
// arguments exchanged it gives a text of the same form for the other host. Empty when they do not
// differ.
std::string difference(const JobSpec& job_spec, const JobSpec& other);

}  // namespace lockstep::launch
