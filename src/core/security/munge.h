// MUNGE, by which processes of one user prove to each other, on all hosts of a cluster, who they
// are: Slurm's own daemons do. By dlopen() of libmunge.so.2. https://github.com/dun/munge
#pragma once

#include <string>
#include <string_view>

namespace lockstep::munge {

// A credential with `text` in it, encrypted: only processes of this user open it, on hosts that
// have the cluster's key. Throws Error with the reason: no library, or no daemon.
std::string seal(std::string_view text);

// Why seal() cannot be called here; empty where it can.
std::string fault();

// What a process of this user has sealed. Each credential opens once on a host, within some minutes
// (MUNGE's time to live). Throws Error with the reason otherwise.
std::string open(const std::string& credential);

}  // namespace lockstep::munge
