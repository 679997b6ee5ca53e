#include "comm/text.h"

#include <c10/util/Exception.h>
#include <fmt/format.h>

#include <string_view>

#include "core/hash/mix.h"
#include "lockstep/core/error.h"

namespace lockstep::comm {
namespace {

int64_t count_of(int64_t count) { return count; }
int64_t count_of(const at::Tensor& tensor) { return tensor.numel(); }

template <class List>
std::string counts(const List& list) {
  constexpr size_t kShown = 16;
  std::string text = "[";
  uint64_t hash = 0;
  size_t seen = 0;
  for (const auto& one : list) {
    hash = mix(hash ^ static_cast<uint64_t>(count_of(one)));
    if (++seen > kShown) continue;
    if (seen > 1) text += ',';
    const fmt::format_int count(count_of(one));
    text.append(count.data(), count.size());
  }
  if (seen > kShown) text += fmt::format(",...: {} counts with the hash {:x}", seen, hash);
  return text += ']';
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

std::string divisor_of(const Request& request) {
  return request.divide_by == 0 ? "" : fmt::format("divided by {}", request.divide_by);
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

std::string thrown_text() {
  try {
    throw;
  } catch (const c10::Error& error) {
    return error.what_without_backtrace();
  } catch (const std::exception& error) {
    return error.what();
  } catch (...) {
    return "an exception that is not a std::exception";
  }
}

std::string told_text() {
  try {
    throw;
  } catch (const ConfigError&) {
    return "c" + thrown_text();
  } catch (...) {
    return "-" + thrown_text();
  }
}

void throw_told(std::string_view told, std::string_view before) {
  const auto text = fmt::format("{}{}", before, told.substr(1));
  if (told.front() == 'c') throw ConfigError(text);
  throw Error(text);
}

std::string beginning_of(std::string_view text) {
  constexpr size_t kShown = 200;
  if (text.size() <= kShown) return std::string(text);
  return fmt::format("{}... ({} bytes)", text.substr(0, kShown), text.size());
}

std::string text_of(std::chrono::milliseconds time) {
  return fmt::format("{:.4g} s", static_cast<double>(time.count()) / 1000.0);
}

std::string list_of(const Request& request) {
  if (request.step_of) return request.step_of->list;
  if (!request.parts.empty())
    return fmt::format("{} in parts of {}", own_count(request), counts(request.parts));
  const auto* list = shared_list(request);
  return list && list->size() > 1 ? counts(*list) : std::string();
}

std::string signature_of(const Request& request) {
  const std::string context = request.context.text(), list = list_of(request);
  if (request.step_of) {
    const Request::Whole& whole = *request.step_of;
    return fmt::format("{} {} {} x {} {} {} {}", name_of(request.what), whole.name,
                       name_of(request.dtype()), list.empty() ? std::to_string(whole.count) : list,
                       divisor_of(request), context, whole.root);
  }
  std::string text(request.name());
  const bool is_message = request.what == Collective::Send || request.what == Collective::Recv;
  if (!context.empty() && !is_message) text += " " + context;
  if (request.what == Collective::Barrier) return text;
  text += fmt::format(" {}", name_of(request.dtype()));
  if (!list.empty()) {
    text += " x " + list;
  } else if (!per_rank_sizes(request)) {
    text += fmt::format(" x {}", own_count(request));
  } else if (request.what == Collective::AllToAll) {
    text += " lists";
  }
  if (request.divide_by != 0) text += " " + divisor_of(request);
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
  const std::string list = list_of(request);
  if (request.step_of) {
    add(fmt::format("{} x {}", name_of(request.dtype()),
                    list.empty() ? std::to_string(request.step_of->count) : list));
    add(divisor_of(request));
    if (request.step_of->root >= 0) add(fmt::format("root {}", request.step_of->root));
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
    add(fmt::format("{} x {}", name_of(request.dtype()),
                    list.empty() ? std::to_string(own_count(request)) : list));
  }
  add(divisor_of(request));
  return fmt::format("{} #{}{}", name_of(request.what), number,
                     inside.empty() ? "" : " (" + inside + ")");
}

}  // namespace lockstep::comm
