#include <fmt/format.h>
#include <fmt/ranges.h>

#include "comm/transport.h"
#include "random/group/plan.h"

namespace lockstep::random_group {
namespace {

std::string name_of(What what) {
  switch (what) {
    case What::AllReduce:
      return "all_reduce";
    case What::Reduce:
      return "reduce";
    case What::ReduceScatter:
      return "reduce_scatter";
    case What::AllGather:
      return "all_gather";
    case What::Broadcast:
      return "broadcast";
    case What::Gather:
      return "gather";
    case What::Scatter:
      return "scatter";
    case What::AllToAll:
      return "all_to_all";
    case What::Message:
      return "send and recv";
    case What::SendRecv:
      return "send_recv";
    case What::AllReduces:
      return "all_reduce of several";
    case What::Broadcasts:
      return "broadcast of several";
    case What::AllGathers:
      return "all_gather of several";
    case What::ReduceScatters:
      return "reduce_scatter of several";
    case What::Barrier:
      return "barrier";
    case What::AllGatherBytes:
      return "all_gather_bytes";
    case What::GatherBytes:
      return "gather_bytes";
    case What::BroadcastBytes:
      return "broadcast_bytes";
  }
  return "?";
}

std::string text_of(const View& view) {
  std::string text = fmt::format("m{}[{}", view.arena, view.offset);
  const bool vector = view.sizes.size() == 1 && view.strides[0] == 1;
  if (vector) return fmt::format("{}:{}]", text, view.offset + view.sizes[0]);
  return fmt::format("{}] sizes {{{}}} strides {{{}}}", text, fmt::join(view.sizes, ","),
                     fmt::join(view.strides, ","));
}

std::string text_of(const std::vector<View>& views) {
  std::vector<std::string> texts;
  for (const View& view : views) texts.push_back(text_of(view));
  return texts.size() == 1 ? texts[0] : fmt::format("({})", fmt::join(texts, "; "));
}

std::string head_of(const Program& program, int index) {
  const Op& op = program.ops[index];
  std::string text = fmt::format("op{} = g{}.{}", index, op.group, name_of(op.what));
  if (is_reduction(op.what)) text += fmt::format(" {}", comm::name_of(op.op));
  if (op.op == comm::ReduceOp::Average && op.divide_by > 0)
    text += fmt::format(" by {}", op.divide_by);
  if (op.fill) text += op.small ? ", new small values" : ", new values";
  if (op.only >= 0) text += fmt::format(", on color {}", op.only);
  if (op.late) text += ", some start it after what follows";
  if (op.polls) text += ", some ask is_completed() until it is";
  if (op.labelled) text += ", some give a label and a deadline";
  if (op.refused) text += ", some first make a call that is refused";
  if (op.then >= 0) text += fmt::format(", then op{}", op.then);
  return text;
}

std::string calls_of(const Program& program, const Plan& plan, int index) {
  std::string text = head_of(program, index) + "\n";
  const Op& op = program.ops[index];
  if (op.what == What::Barrier) return text;
  for (int rank = 0; rank < program.size(); ++rank) {
    if (!plan.calls[index][rank]) continue;
    const Call& call = *plan.calls[index][rank];
    text += fmt::format("    rank {} (of {}, {} of {}):", rank, fmt::join(call.members, " "),
                        call.rank, call.members.size());
    if (op.what == What::Message) {
      text += call.sends ? fmt::format(" to {}", call.to) : fmt::format(" from {}", call.root);
    } else {
      text += fmt::format(" root {}", call.root);
    }
    if (!call.inputs.empty()) text += " in " + text_of(call.inputs);
    if (!call.outputs.empty()) text += " out " + text_of(call.outputs);
    if (drops(program, index, rank)) text += ", dropped";
    text += "\n";
  }
  return text;
}

std::string text_of(const Program& program, const Plan& plan, const Step& step) {
  switch (step.kind) {
    case Step::Kind::Split: {
      const Split& split = program.splits[step.which];
      std::vector<std::string> ranks;
      for (const int r : program.ranks)
        ranks.push_back(fmt::format("({}, {})", split.colors[r], split.keys[r]));
      return fmt::format("g{} = g{}.{} with {}\n", step.which + 1, split.parent,
                         split.lists ? "subgroup() of color 0" : "split(color, key)",
                         fmt::join(ranks, " "));
    }
    case Step::Kind::Allocate: {
      const Arena& arena = program.arenas[step.which];
      const char* kind = arena.kind == Arena::Kind::Private   ? "private"
                         : arena.kind == Arena::Kind::OfGroup ? "empty"
                                                              : "shared, a part for each rank";
      return fmt::format("m{} = g{} {}: {} x {}\n", step.which, arena.group, kind,
                         plan.arena_sizes[step.which], comm::name_of(arena.dtype));
    }
    case Step::Kind::Start: {
      const Op& op = program.ops[step.which];
      return calls_of(program, plan, step.which) +
             (op.then >= 0 ? "  " + calls_of(program, plan, op.then) : "");
    }
    case Step::Kind::Wait:
      return fmt::format("wait for op{}{}{}\n", fmt::join(step.ops, ", op"),
                         step.ops.size() > 1 ? " in an order of each rank's own" : "",
                         step.settled ? ", over where it was dropped, too" : "");
    case Step::Kind::Poll:
      return fmt::format("ask whether op{} is over\n", step.which);
  }
  return {};
}

}  // namespace

std::string text_of(const Program& program) {
  const Plan plan(program);
  std::string text = fmt::format("{} ranks", program.size());
  if (!program.hosts.empty()) {
    std::vector<int> hosts;
    for (const int rank : program.ranks) hosts.push_back(program.hosts[rank]);
    text += fmt::format(" on hosts {}", fmt::join(hosts, " "));
  }
  text += "\n";
  for (const Step& step : program.steps) text += text_of(program, plan, step);
  return text;
}

}  // namespace lockstep::random_group
