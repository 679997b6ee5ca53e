#include "launch/incarnation.h"

#include "launch/child.h"
#include "launch/environment.h"
#include "launch/supervisor.h"
#include "lockstep/core/control.h"

namespace lockstep::launch {

Outcome run_incarnation(Session& session, Plan plan, Outside* outside) {
  ChildSpec spec;
  spec.path = session.program;
  spec.command = session.options.command;
  // One rank is its program as if started by hand: a terminal stays a terminal, and nothing needs a
  // tag.
  spec.streams = plan.world_size == 1 ? Streams::Shared : Streams::Piped;

  Control control = Control::create(plan.local_ranks);
  Supervisor supervisor(session, plan, control, outside);
  try {
    for (int local = 0; local < plan.local_ranks; ++local) {
      const int rank = plan.first_rank + local;
      Variables variables = rank_variables(session.options, plan, local);
      variables[Control::kVariable] = std::to_string(control.fd());
      spec.inherited = {control.fd()};
      spec.input = rank == 0 ? ChildSpec::Input::Shared : ChildSpec::Input::None;
      if (plan.listener) {
        variables["LOCKSTEP_STORE_FD"] = std::to_string(plan.listener.get());
        spec.inherited.push_back(plan.listener.get());
      }
      spec.environment = environment_with(variables);
      Child child = start_child(spec, session.signals);
      // Rank 0 alone keeps the socket: when it is gone, so is the port, and nobody waits for an
      // answer.
      plan.listener.reset();
      supervisor.watch(local, child.pid);
      if (spec.streams == Streams::Piped) {
        session.output.attach(rank, std::move(child.out), std::move(child.err));
      }
    }
  } catch (...) {
    Supervisor::end_everything();
    throw;
  }
  return supervisor.run();
}

}  // namespace lockstep::launch
