// The file `latest` of a directory of checkpoints: the newest one's name and its manifest's
// checksum, "step-00001200 0123456789abcdef\n".
#pragma once

#include <optional>
#include <string>
#include <string_view>

#include "lockstep/checkpoint/directory.h"
#include "lockstep/checkpoint/file_system.h"

namespace lockstep::checkpoint {

// Whether there is such a directory. Throws CheckpointError when it cannot be listed, or a symbolic
// link on the way to it leads nowhere.
bool is_there(const std::string& directory, FileSystem& files);

// The path of a checkpoint's manifest.
std::string manifest_path(const std::string& directory, const std::string& name);

// What `latest` holds for a checkpoint of this name and with these bytes as its manifest.
std::string latest_text(const std::string& name, std::string_view manifest);

// Nothing when `latest` holds the newest of the listing, or when that cannot be said: there is
// none, or one that cannot be read and may be newer. Else what it should hold.
std::optional<std::string> missing_in_latest(const std::string& directory, const Listing& listing,
                                             FileSystem& files);

// Replaces `latest`; it is on the disk when this returns. For the directory's writer only.
void write_latest(const std::string& directory, const std::string& text, FileSystem& files);

// Lets `latest` name the newest checkpoint, as after every save: a job may have been killed between
// publishing a checkpoint and replacing `latest`, and the next job may have nothing left to save.
// A job that starts to write there meanwhile waits for it. Leaves `latest` as it is while another
// process writes checkpoints there, where it cannot be written, and where no job has ever written,
// as in a folder of copies.
void mend_latest(const std::string& directory, FileSystem& files) noexcept;

}  // namespace lockstep::checkpoint
