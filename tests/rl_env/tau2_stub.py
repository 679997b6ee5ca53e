"""Runs tools/tau2/lockstep_tau2.py, its argument, without tau2: worlds with one task, one of whose tools hangs."""
import os
import runpy
import signal
import sys
from importlib import metadata
from types import SimpleNamespace
from unittest.mock import MagicMock


class Folder:
    def __truediv__(self, name):
        return self

    def read_text(self, encoding):
        return "Be brief."


class World:
    user_tools = None

    def set_state(self, *state):
        pass

    def get_tools(self):
        return []

    def get_policy(self):
        return "p"

    def get_db_hash(self):
        return "a"

    get_user_db_hash = get_db_hash

    def get_response(self, call):
        content, error = "", False
        if call.name == "seconds":
            content = str(signal.getitimer(signal.ITIMER_REAL)[0])
        if call.name == "hang":
            try:
                os.kill(os.getpid(), signal.SIGALRM)  # so long has it taken
                while True:
                    pass
            except Exception as raised:  # as tau2 does with those of its tools
                content, error = str(raised), True
        return SimpleNamespace(id=call.id, content=content, error=error)


TASK = SimpleNamespace(id="0", initial_state=None, user_scenario="s",
                       evaluation_criteria=SimpleNamespace(reward_basis=[]))
for name in ["loguru", "tau2", "tau2.data_model", "tau2.data_model.message", "tau2.data_model.tasks", "tau2.domains",
             "tau2.domains.airline", "tau2.domains.retail", "tau2.domains.telecom", "tau2.evaluator",
             "tau2.evaluator.evaluator_action", "tau2.evaluator.evaluator_communicate",
             "tau2.evaluator.evaluator_env", "tau2.utils"]:
    sys.modules[name] = MagicMock()
sys.modules["tau2.data_model.message"].ToolCall = SimpleNamespace
sys.modules["tau2.utils"].DATA_DIR = Folder()
airline = sys.modules["tau2.domains.airline"].environment
airline.get_environment = World
airline.get_tasks = lambda split: [TASK]
metadata.version = lambda package: "stub"
runpy.run_path(sys.argv[1], run_name="__main__")
