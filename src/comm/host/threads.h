// How many threads a rank computes with, where neither the user nor a launcher has set it.
#pragma once

#include <string>
#include <vector>

namespace lockstep::comm {

// What ranks tell each other before the cores of a machine are divided among them.
struct Cores {
  std::string machine = {};    // equal for ranks on one
  std::string container = {};  // equal for ranks in one, or outside of any
  std::vector<int> ids = {};   // that the process may use; empty where that is not known
  int allowed = 0;             // whose time its control groups allow; 0: no limit
  int threads = 1;             // that libtorch has now
  bool is_fixed = true;        // by OMP_NUM_THREADS
};

// This process, but for machine and container.
Cores this_process_cores();

// "0-3,8", and back.
std::string text_of_cores(const std::vector<int>& ids);
std::vector<int> cores_of_text(const std::string& text);

// What each rank without OMP_NUM_THREADS is to have: a core counts for those of its machine that
// may use it in equal parts, and what control groups allow for those of the container. All get what
// the one with the least has, at most what each has now: ranks compute the same norms from the same
// gradients only if they add them up in the same number of threads.
int fair_threads(const std::vector<Cores>& ranks);

// The text of a warning that names ranks whose number differs from rank 0's, because their
// OMP_NUM_THREADS does; empty where none does.
std::string uneven_threads(const std::vector<Cores>& ranks);

// From now on the calling thread computes with this many; and every other one, too, from the next
// memory on that it takes for a tensor. To be called while no other thread computes.
void compute_with(int threads);

}  // namespace lockstep::comm
