// One string from rank 0 to all ranks, through the process manager that has started them. Every
// rank calls the same function once; the connection to the manager is closed afterwards, in order.
#pragma once

#include <chrono>
#include <string>

namespace lockstep {

// MPICH's, whose connection is the descriptor PMI_FD: lines of the PMI-1 protocol. `word` is rank
// 0's, of at most 1,000 bytes without spaces, and empty elsewhere. Blocks until all ranks have
// called, at most for `timeout`; throws CommError then, and for an answer that is none.
std::string exchange_over_pmi(int fd, const std::string& word, std::chrono::milliseconds timeout);

// Open MPI's, over PMIx (libpmix.so.2, which Open MPI itself needs). Likewise; throws CommError
// also when the library is not there.
std::string exchange_over_pmix(const std::string& word, std::chrono::milliseconds timeout);

}  // namespace lockstep
