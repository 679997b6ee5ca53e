// Which job of a launcher works in a folder, so that a run continues in it after a restart, and
// another run does not take it for its own.
#pragma once

#include <string>

namespace lockstep {

// Writes which job of the launcher's this is into FOLDER/job.txt; nothing without a launcher.
// Throws Error.
void write_job_file(const std::string& folder);

// Whether what wrote there was a job of this one's name, such as this one.
bool names_this_job(const std::string& folder);

// Whether the launcher of the job that wrote there has started its ranks again.
bool is_restarted_job(const std::string& folder);

}  // namespace lockstep
