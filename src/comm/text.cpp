#include "comm/text.h"

#include <c10/util/Exception.h>
#include <fmt/format.h>

#include <string_view>

namespace lockstep::comm {
namespace {

std::string counts(const std::vector<at::Tensor>& list) {
  std::string text;
  for (const at::Tensor& tensor : list)
    text += fmt::format("{}{}", text.empty() ? "" : ",", tensor.numel());
  return "[" + text + "]";
}

// The list in which every rank has the same sizes, or nothing.
const std::vector<at::Tensor>* shared_list(const Request& request) {
  if (request.what == Collective::AllGather) return &request.outputs;
  if (request.what == Collective::ReduceScatter) return &request.inputs;
  return nullptr;
}

bool per_rank_sizes(const Request& request) {
  return request.what == Collective::Gather || request.what == Collective::Scatter ||
         (request.what == Collective::AllToAll && request.outputs.size() > 1);
}

int64_t own_count(const Request& request) {
  const bool from_input = request.what == Collective::AllGather ||
                          request.what == Collective::Gather || request.what == Collective::Send ||
                          request.what == Collective::AllToAll;
  const std::vector<at::Tensor>& list = from_input ? request.inputs : request.outputs;
  int64_t count = 0;
  for (const at::Tensor& tensor : list) count += tensor.numel();
  return count;
}

}  // namespace

std::string first_line(const std::exception& error) {
  const auto* torch = dynamic_cast<const c10::Error*>(&error);
  std::string text = torch ? torch->what_without_backtrace() : error.what();
  text = text.substr(0, text.find('\n'));
  // Gloo begins with "[/source/file.cc:123] " and closes with advice of its own.
  if (const size_t end = text.find("] "); text.starts_with("[/") && end != text.npos)
    text.erase(0, end + 2);
  if (const size_t advice = text.find(". This is typically"); advice != text.npos)
    text.erase(advice);
  return text;
}

std::string text_of(std::chrono::milliseconds time) {
  return fmt::format("{:.4g} s", static_cast<double>(time.count()) / 1000.0);
}

std::string signature_of(const Request& request) {
  const std::string context = request.context.text();
  if (request.step_of) {
    return fmt::format("{} {} {} x {} {}", name_of(request.what), request.step_of->name,
                       name_of(request.dtype()), request.step_of->count, context);
  }
  std::string text = request.name();
  const bool is_message = request.what == Collective::Send || request.what == Collective::Recv;
  if (!context.empty() && !is_message) text += " " + context;
  if (request.what == Collective::Barrier) return text;
  text += fmt::format(" {}", name_of(request.dtype()));
  const auto* list = shared_list(request);
  if (list && list->size() > 1) {
    text += " x " + counts(*list);
  } else if (!per_rank_sizes(request)) {
    text += fmt::format(" x {}", own_count(request));
  } else if (request.what == Collective::AllToAll) {
    text += " lists";
  }
  switch (request.what) {
    case Collective::Send:
    case Collective::Recv:
      return fmt::format("message {}{}", request.tag, text.substr(name_of(request.what).size()));
    case Collective::Reduce:
    case Collective::Broadcast:
    case Collective::Gather:
    case Collective::Scatter:
      return text + fmt::format(" root {}", request.peer);
    default:
      return text;
  }
}

std::string text_of(const Request& request, uint64_t number) {
  std::string inside = request.label;
  const auto add = [&inside](const std::string& part) {
    inside += inside.empty() || part.empty() ? part : ", " + part;
  };
  add(request.context.text());
  if (request.step_of) {
    add(fmt::format("{} x {}", name_of(request.dtype()), request.step_of->count));
    return fmt::format("{} #{} ({})", request.step_of->name, number, inside);
  }
  switch (request.what) {
    case Collective::Barrier:
      break;
    case Collective::Send:
      add(fmt::format("to rank {}, message {}", request.peer, request.tag));
      break;
    case Collective::Recv:
      add(fmt::format("from rank {}, message {}", request.peer, request.tag));
      break;
    case Collective::Reduce:
    case Collective::Broadcast:
    case Collective::Gather:
    case Collective::Scatter:
      add(fmt::format("root {}", request.peer));
      break;
    default:
      break;
  }
  if (reduces(request.what)) add(std::string(name_of(request.op)));
  if (request.what != Collective::Barrier) {
    const auto* list = shared_list(request);
    add(fmt::format("{} x {}", name_of(request.dtype()),
                    list && list->size() > 1 ? counts(*list) : std::to_string(own_count(request))));
  }
  return fmt::format("{} #{}{}", name_of(request.what), number,
                     inside.empty() ? "" : " (" + inside + ")");
}

}  // namespace lockstep::comm
