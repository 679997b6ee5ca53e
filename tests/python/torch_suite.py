"""PyTorch's own distributed_test.py, which is in its wheel, over Lockstep: torch_suite.py [unittest's arguments]

BACKEND, WORLD_SIZE and TEMP_DIR (with a folder "barrier" inside) are what the tests read. Ranks are forked, which
takes a tenth of the time of starting an interpreter for each.
"""
import os

# On a CI machine torch's helpers write XML reports with a package of its developers, and leave tests out.
for name in ("CI", "SANDCASTLE"):
    os.environ.pop(name, None)

import torch  # noqa: E402
from torch.testing._internal.common_distributed import DistTestCases  # noqa: E402

NAME = os.environ["BACKEND"]
for feature in ("ddp", "subgroup", "plugin"):
    DistTestCases.backend_feature[feature].add(NAME)
from torch.testing._internal.common_utils import run_tests  # noqa: E402
from torch.testing._internal.distributed import distributed_test  # noqa: E402

torch.distributed.Backend._ensure_backend_registered(NAME)


class TestLockstep(distributed_test.TestDistBackend, distributed_test.DistributedTest._DistTestBase):
    def setUp(self):
        super().setUp()
        self._start_processes(torch.multiprocessing.get_context("fork").Process)


if __name__ == "__main__":
    run_tests()
