"""Interpreters that start and end in every way: exits.py TIMES

Each time two ranks meet, start an operation that nobody waits for, and end: after destroy_process_group() or without
it, by an exception, with a thread that still waits, or with one that calls when all is over. Counts those that do not
end as they should, or not at all. A rank is forked off an interpreter that has imported torch, which takes a start from
seconds to milliseconds, and ends as any interpreter does.
"""
import atexit
import os
import shutil
import signal
import sys
import tempfile
import threading
import time

import torch
import torch.distributed as dist

WAYS = ("destroyed", "left", "error", "thread", "late")
LIMIT = 60  # seconds
over = threading.Event()
late = []  # threads that call when all is over


def receive(rank, into):
    """In a thread of its own, which must not come back: the interpreter that it would come back to is ending."""
    dist.recv(into, 1 - rank)


def receive_late(rank, into):
    over.wait()
    receive(rank, into)


def when_all_is_over():
    over.set()
    for thread in late:
        thread.join(0.2)
        if not thread.is_alive():
            os._exit(3)


def waits(thread):
    """Whether it is in recv()'s wait, or about to enter it."""
    frame = sys._current_frames().get(thread.ident)
    return frame and frame.f_code.co_name == "recv" and "work" in frame.f_locals


def rank_of(rank, way, rendezvous):
    dist.init_process_group("lockstep", init_method=f"file://{rendezvous}", rank=rank, world_size=2)
    tensor = torch.ones(1 << 18)
    dist.all_reduce(torch.ones(5))
    work = dist.all_reduce(tensor, async_op=True)
    work.get_future().then(lambda future: future.value())
    if way in ("thread", "late"):
        target = receive if way == "thread" else receive_late
        thread = threading.Thread(target=target, args=(rank, torch.empty(1)), daemon=True)
        if way == "late":
            late.append(thread)
        thread.start()
        while way == "thread" and not waits(thread):
            time.sleep(0.001)
    if way == "destroyed":
        work.wait()
        assert tensor[0] == 2
        dist.destroy_process_group()
    if way == "error":
        raise RuntimeError("meant to end this process")


def status_of(pid):
    """As waitstatus_to_exitcode says it."""
    limit = time.monotonic() + LIMIT
    while time.monotonic() < limit:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.002)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    return "hung"


def one(way):
    """The ranks' exit statuses."""
    # Not by `with`, which the ranks would leave, too: the file has to stay until both have ended.
    folder = tempfile.mkdtemp()
    children = []
    for rank in range(2):
        pid = os.fork()
        if pid == 0:
            os.dup2(os.open(os.devnull, os.O_WRONLY), 2 if way == "error" else 1)
            rank_of(rank, way, folder + "/rendezvous")
            sys.exit(0)
        children.append(pid)
    codes = [status_of(pid) for pid in children]
    shutil.rmtree(folder)
    return codes


def main():
    times, bad = int(sys.argv[1]), 0
    torch.set_num_threads(1)
    atexit.register(when_all_is_over)  # before the backend's own handler, so called after it
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
