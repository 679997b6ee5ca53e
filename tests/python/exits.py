"""Interpreters that start and end in every way: exits.py TIMES

Each time two ranks meet, start an operation that nobody waits for, and end: after destroy_process_group() or without it,
by an exception, or with a thread that still waits. Counts those that do not end as they should, or not at all. A rank is
forked off an interpreter that has imported torch, which takes a start from seconds to milliseconds, and ends as any
interpreter does.
"""
import os
import signal
import sys
import tempfile
import threading
import time

import torch
import torch.distributed as dist

WAYS = ("destroyed", "left", "error", "thread")
LIMIT = 30  # seconds


def rank_of(rank, way, rendezvous):
    dist.init_process_group("lockstep", init_method=f"file://{rendezvous}", rank=rank, world_size=2)
    tensor = torch.ones(1 << 18)
    dist.all_reduce(torch.ones(5))
    work = dist.all_reduce(tensor, async_op=True)
    work.get_future().then(lambda future: future.value())
    if way == "thread":
        threading.Thread(target=lambda: dist.recv(torch.empty(1), 1 - rank), daemon=True).start()
    if way == "destroyed":
        work.wait()
        assert tensor[0] == 2
        dist.destroy_process_group()
    if way == "error":
        raise RuntimeError("meant to end this process")


def one(way):
    """The ranks' exit statuses, as waitstatus_to_exitcode says them."""
    with tempfile.TemporaryDirectory() as folder:
        children = []
        for rank in range(2):
            pid = os.fork()
            if pid == 0:
                os.dup2(os.open(os.devnull, os.O_WRONLY), 2 if way == "error" else 1)
                rank_of(rank, way, folder + "/rendezvous")
                sys.exit(0)
            children.append(pid)
        limit = time.monotonic() + LIMIT
        codes = []
        for pid in children:
            done = 0
            while not done and time.monotonic() < limit:
                done, status = os.waitpid(pid, os.WNOHANG)
                time.sleep(0.002)
            if not done:
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
            codes.append(os.waitstatus_to_exitcode(status) if done else "hung")
        return codes


def main():
    times, bad = int(sys.argv[1]), 0
    torch.set_num_threads(1)
    dist.Backend._ensure_backend_registered("lockstep")
    for i in range(times):
        way = WAYS[i % len(WAYS)]
        codes = one(way)
        # The error reaches sys.exit's caller as status 1.
        if codes != [1 if way == "error" else 0] * 2:
            bad += 1
            print(f"{i}: {way}: {codes}", flush=True)
    print(f"{times} starts and ends of two ranks, {bad} not as they should be")
    sys.exit(bad > 0)


main()
