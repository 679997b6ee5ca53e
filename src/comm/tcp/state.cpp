#include "comm/tcp/state.h"

#include <fmt/format.h>

#include <algorithm>

#include "core/hash/mix.h"

namespace lockstep::comm {

using std::chrono::milliseconds;
using std::chrono::steady_clock;

// The keys under which the group meets belong to no other group, and are the same on every rank.
TcpState::TcpState(std::shared_ptr<Net> net, const Store& store, int rank,
                   const TcpOptions& options)
    : GroupHealth("tcp", store, rank, options.members),
      net_(std::move(net)),
      options_(options),
      group_(net_, fnv1a<uint64_t>(store.keys()), rank, members()) {}

std::string TcpState::words(const NetFailure& failure) const {
  if (failure.contradicts || failure.peer < 0) return failure.what;
  return fmt::format("failed ({} {})", diagnosis().name(failure.peer), failure.what);
}

bool TcpState::await(const NetJob& job, WireOperation& operation, steady_clock::time_point until) {
  for (;;) {
    if (!job.is_over()) check_alive();
    const auto now = steady_clock::now();
    const auto slice = std::max(milliseconds(1), std::min(kSlice, operation.left()));
    if (group_.wait(job, until - now < slice ? until : now + slice)) {
      if (job.failure()) {
        check_alive();
        fail(operation, words(*job.failure()));
      }
      done(operation);
      return true;
    }
    operation.excuse(steady_clock::now() - now, slice);
    if (operation.left().count() == 0 && operation.notice.advice.empty())
      operation.notice.advice = net_->unacknowledged();
    attend(operation);
    if (steady_clock::now() >= until) return false;
  }
}

}  // namespace lockstep::comm
