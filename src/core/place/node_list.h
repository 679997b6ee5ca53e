// Slurm's short forms, as `scontrol show hostnames` expands them; without scontrol, which needs the
// cluster's configuration and may wait for a minute where there is none.
#pragma once

#include <string>
#include <string_view>
#include <vector>

namespace lockstep {

// "node[1-3,5],login" is node1 node2 node3 node5 login; "n[01-03]" keeps the width; several
// brackets give all combinations, the last one running fastest. Order and duplicates are kept.
// Throws ConfigError that quotes the list and says where it goes wrong, also for one of more than
// 65,536 names, and for text after a bracket, which Slurm refuses, too.
std::vector<std::string> expand_node_list(std::string_view list);

// SLURM_TASKS_PER_NODE: "2(x3),1" is 2 2 2 1. Throws ConfigError likewise.
std::vector<int> expand_task_counts(std::string_view counts);

}  // namespace lockstep
