// The part of a call that is the same for all transports: its order after dropped operations,
// copies that make tensors contiguous, and its record.
#pragma once

#include <c10/core/Stream.h>

#include <functional>
#include <optional>
#include <vector>

#include "comm/transport.h"

namespace lockstep::comm {

// Starts a request whose tensors may lie in memory in any way. The flight recorder gets the call,
// when it began and how long the rank waits in it, except in a group of one. When the Work is
// dropped, the group finishes it. With a stream the operation begins after what is on that stream
// and ends on it, instead of on the current one.
Work start_call(Transport& transport, Request&& request, std::optional<c10::Stream> stream = {});

// What comes before any call: dropped operations that share memory with `uses`, as
// Unfinished::finish_before() has it, and every dropped then().
void finish_dropped(Transport& transport, const Uses& uses = {});

// From the first element to the last; empty for a tensor without elements.
Span span_of(const at::Tensor& tensor);
// The memory of an operation's tensors: inputs are read, outputs written.
Uses uses_of(const std::vector<at::Tensor>& inputs, const std::vector<at::Tensor>& outputs);

// Several operations that were started, as one that uses `uses`: over when all of them are and
// `finish` has run.
Work together(
    Transport& transport, Uses uses, std::vector<Work> works, std::optional<c10::Stream> stream,
    std::function<void()> finish = [] {});

// `input` into `output`, without the other ranks.
Work copy_alone(Transport& transport, const at::Tensor& output, const at::Tensor& input,
                std::optional<c10::Stream> stream);

}  // namespace lockstep::comm
