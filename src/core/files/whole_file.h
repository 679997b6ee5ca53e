// Files that are there whole or not at all.
#pragma once

#include <string>
#include <string_view>

namespace lockstep {

// Whether there is something that is neither a file nor a folder: a pipe, a device, or what a link
// as /dev/stdout leads to.
bool is_stream(const std::string& path);

// Writes beside `path` and renames, so that readers see the old or the new bytes. What a link leads
// to is replaced or made, not the link; a stream is written to as it is. Rights are as open(2)
// leaves them: those of the file that is replaced, else what the umask allows. 0, or the errno of
// what failed, after which `path` is as it was.
[[nodiscard]] int write_whole_file(const std::string& path, std::string_view bytes);

// Makes a file, and nothing in the place of another one: EEXIST where anything is there, be it a
// link that leads nowhere. After another error there is none.
[[nodiscard]] int write_new_file(const std::string& path, std::string_view bytes);

// After it the disk has the names in the folder of `path`, too, where its file system can say so.
// 0, or the errno of what failed.
[[nodiscard]] int sync_folder_of(const std::string& path);

// Takes away what write_whole_file() would replace: a file, or the bytes of that to which a link
// leads. A stream stays as it is. What fails, writing says better.
void remove_whole_file(const std::string& path);

}  // namespace lockstep
