// torch.distributed over Lockstep's transports: a c10d::Backend, without Python.
#pragma once

#include <c10/util/intrusive_ptr.h>

#include "lockstep/comm/join.h"

namespace c10d {
class Backend;
class Store;
}  // namespace c10d

namespace lockstep::c10d_backend {

// A backend for all processes that call it with the same store, as c10d's own for CPUs: every
// collective, messages (by tag in any order, and from any rank), coalescing, split, abort. Its
// calls are those of c10d::Backend, with tensors on the CPU: of the dtypes that comm::Group
// carries, complex ones for sums, and of any dtype where nothing is combined. Any thread may call.
//
// An operation that the caller waits for runs in the caller's thread; others progress in a thread
// of the backend, which starts when it is first needed. Works have futures, whose callbacks run one
// at a time, in the order of the operations; one may wait for operations that it has started
// itself, also by their futures, while another thread makes them progress. Collectives that are
// called after the future of another was asked for start when its callbacks have returned, after
// what these have started; so the ranks' order does not depend on when callbacks run. An error
// reaches who waits as c10::DistBackendError, and wrong arguments as c10::ValueError from the call.
// After a DistBackendError of a collective the group has failed, and further calls throw at once.
// shutdown() finishes for its timeout what others wait for, and messages that no rank receives for
// about a second. Blocks as comm::join_group() does, and throws what it throws, as c10d's errors.
c10::intrusive_ptr<::c10d::Backend> make_backend(const c10::intrusive_ptr<::c10d::Store>& store,
                                                 const comm::Membership& me,
                                                 const comm::GroupOptions& options = {});

// What a process does before it ends without having shut its groups down: finishes for a second
// what others wait for, and ends the backends' threads. Later calls on any backend throw; threads
// that wait in one are left waiting.
void shut_all_down() noexcept;

}  // namespace lockstep::c10d_backend
