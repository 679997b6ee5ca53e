"""A rank that does nothing but meet the others: what torchrun and torch.distributed need until then, and after a death.

Says "ready NS" (CLOCK_MONOTONIC) on rank 0 after the first barrier. With --kill rank 1 of the first incarnation then
says "fault NS" and kills itself.
"""
import os
import signal
import sys
import time

import torch
import torch.distributed as dist



def say(word):
    # In one piece: ranks share the stream.
    os.write(1, f"{word} {time.monotonic_ns()}\n".encode())


dist.init_process_group("gloo")
dist.barrier()
if dist.get_rank() == 0:
    say("ready")
if "--kill" in sys.argv and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
    if dist.get_rank() == 1:
        say("fault")
        os.kill(os.getpid(), signal.SIGKILL)
    dist.all_reduce(torch.ones(1))
dist.barrier()
