// What a call is beside its transport's part: its order behind dropped operations, contiguous
// tensors, and its record.
#pragma once

#include <c10/core/Stream.h>

#include <functional>
#include <optional>
#include <vector>

#include "comm/transport.h"

namespace lockstep::comm {

// Starts a request whose tensors may lie in memory in any way. What it is, when it began and that
// it is waited in is recorded, except in a group of one. Dropped, it is finished by the group.
// With a stream it begins after what is on that one and ends on it, in place of the current one.
Work start_call(Transport& transport, Request&& request, std::optional<c10::Stream> stream = {});

// From the first element to the last; nothing of a tensor without any.
Span span_of(const at::Tensor& tensor);
// What tensors lie in, as of an operation that reads and writes them.
Uses uses_of(const std::vector<at::Tensor>& inputs, const std::vector<at::Tensor>& outputs);

// Operations that were started, as one that uses `uses`: over when all are and `finish` has run.
Work together(
    Transport& transport, Uses uses, std::vector<Work> works, std::optional<c10::Stream> stream,
    std::function<void()> finish = [] {});

// `input` into `output`, without the other ranks.
Work copy_alone(Transport& transport, const at::Tensor& output, const at::Tensor& input,
                std::optional<c10::Stream> stream);

}  // namespace lockstep::comm
