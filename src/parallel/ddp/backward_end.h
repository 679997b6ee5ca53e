// The end of a backward(), also of one that runs others inside (re-entrant checkpointing).
#pragma once

#include <functional>

namespace lockstep::parallel {

// Called within backward(). Runs `reached` when the outermost backward() of those under way on this
// thread has computed everything, before it returns; what `reached` throws, it throws. Runs
// `abandoned` when that backward() ends with an exception instead.
void at_end_of_backward(std::function<void()> reached, std::function<void()> abandoned);

}  // namespace lockstep::parallel
