"""Of four ranks two end well, then one of the two others, which have a group of their own, is killed: fates.py"""
import os
import signal
import time

import torch
import torch.distributed as dist


def await_end(pid):
    """Until the launcher has seen it."""
    while os.path.exists(f"/proc/{pid}"):
        time.sleep(0.001)


def main():
    dist.init_process_group("lockstep")
    group = dist.new_group([2, 3])
    processes = [None] * 4
    dist.all_gather_object(processes, os.getpid())
    rank = dist.get_rank()
    if rank < 2:
        dist.destroy_process_group()
        return
    if rank == 3:
        await_end(processes[0])
        await_end(processes[1])
        os.kill(os.getpid(), signal.SIGKILL)
    dist.all_reduce(torch.ones(1), group=group)


main()
