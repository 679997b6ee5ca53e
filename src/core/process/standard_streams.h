// Descriptors 0, 1 and 2 of a process that was started without some of them.
#pragma once

namespace lockstep {

// Opens those that are closed, on /dev/null. A daemon may start a program so: the next file, socket
// or memory that is opened would be its stdout, and what it prints would go there, into a
// checkpoint's shard for example. Called before the library keeps a descriptor open.
void open_standard_streams() noexcept;

}  // namespace lockstep
