"""Random faults at random times in real training jobs, until the time is over; then a table, and status 1 for any hang,
leftover or wrong end.

python3 soak.py BUILD_DIR MINUTES [SEED]

Each job is the trainer of faults_test.py on 2 to 4 ranks, over shm or gloo, with or without --max-restarts 1. Faults come from
outside (SIGKILL and SIGSTOP of random ranks, SIGKILL and SIGTERM of the launcher) at a random moment of the training, or from inside
(exceptions, crashes, early exits, mismatched collectives) at a random step and place.
"""
import os
import pathlib
import random
import signal
import statistics
import sys
import time

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))
from support.training import Training, is_alive  # noqa: E402

BUILD = pathlib.Path(sys.argv[1]).resolve()
OUTSIDE = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP, "kill two": signal.SIGKILL, "kill launcher": signal.SIGKILL,
           "stop launcher": signal.SIGTERM}
INSIDE = {"throw": 3, "segv": 139, "abort": 134, "exit7": 7, "exit0": 1, "count": 1, "dtype": 1, "root": 1, "collective": 1}
MISMATCHES = {"count", "dtype", "root", "collective"}
PLACES = ["loader", "forward", "backward", "optimizer", "barrier"]
TIMEOUT_S = 2       # a collective's deadline
HANG_S = 60         # nothing here takes that long, on however busy a machine
STEPS = 1_000_000


class Tally:
    """What happened with one kind of fault."""

    def __init__(self):
        self.injected = self.detected = self.healed = self.hangs = self.leftovers = self.wrong = 0
        self.known_s, self.over_s = [], []


def random_fault(chance):
    kind = chance.choice(list(OUTSIDE) + list(INSIDE))
    ranks = chance.choice([2, 3, 4])
    restarts = chance.choice([0, 1]) if "launcher" not in kind else 0
    return kind, ranks, chance.choice(["shm", "gloo"]), restarts, chance.randrange(ranks)


def inject_from_outside(chance, job, kind, victim):
    """Does it at a random moment of the first second of training; returns when, in ns."""
    job.await_line("training")
    pids = job.pids()
    time.sleep(chance.random())
    at = time.monotonic_ns()
    if "launcher" in kind:
        job.process.send_signal(OUTSIDE[kind])
    else:
        for pid in {pids[victim], pids[(victim + 1) % len(pids)]} if kind == "kill two" else {pids[victim]}:
            if is_alive(pid):
                os.kill(pid, OUTSIDE[kind])
    return at


def expected(kind, restarts):
    """The job's exit statuses, one of which is right."""
    if restarts:
        return {0}
    if kind == "kill launcher":
        return {-signal.SIGKILL}
    if kind == "stop launcher":
        return {128 + signal.SIGTERM}
    if kind in ("kill", "kill two"):
        return {128 + signal.SIGKILL}
    return {1} if kind == "stop" else {INSIDE[kind]}


def run_one(chance, tallies):
    kind, ranks, backend, restarts, victim = random_fault(chance)
    tally = tallies.setdefault((kind, backend), Tally())
    flags = ("--max-restarts", restarts)
    # With a restart the second incarnation goes to its end, which must not take long.
    steps = 400 if restarts else STEPS
    fault = ()
    if kind in INSIDE:
        place = "barrier" if kind in MISMATCHES else chance.choice(PLACES)
        fault = (victim, chance.randrange(0, 200), place, kind)
    job = Training(BUILD, ranks, backend, fault, steps=steps, flags=flags, timeout_s=TIMEOUT_S,
                   OUTER_MARK=f"{os.getpid()}")
    text = f"{kind} of rank {victim} of {ranks}, {backend}, {restarts} restarts, {fault}"
    try:
        if fault:
            job.await_line("fault")
            at = max(job.times("fault").values())
        else:
            at = inject_from_outside(chance, job, kind, victim)
        tally.injected += 1
        try:
            status = job.wait(HANG_S)
        except AssertionError as hang:
            tally.hangs += 1
            return f"HANG: {text}: {hang}"
        if kind == "kill launcher":
            end = time.monotonic() + 5  # its ranks have no father any more
            while job.leftovers() and time.monotonic() < end:
                time.sleep(0.005)
            job.ended_ns = time.monotonic_ns()
        if left := job.leftovers():
            tally.leftovers += 1
            return f"LEFT: {text}: {left}: {job}"
        # A mismatch that both sides see may end before a restarted run has trained to its end; what counts is that it did.
        early = not job.times("known") and restarts and "restart 1 of 1" not in job.err
        if status not in expected(kind, restarts) or (restarts and not early and "done" not in job.out):
            tally.wrong += 1
            return f"WRONG END {status}, expected {expected(kind, restarts)}: {text}: {job}"
        tally.detected += 1
        tally.healed += restarts
        known = [ns for ns in job.times("known").values() if ns >= at]
        if known:
            tally.known_s.append((max(known) - at) * 1e-9)
        if not restarts:
            tally.over_s.append((job.ended_ns - at) * 1e-9)
        return None
    finally:
        job.end()


def print_table(tallies, minutes):
    print(f"\n{'fault':14} {'over':5} {'injected':>8} {'detected':>8} {'healed':>7} {'hangs':>6} {'left':>5} {'wrong':>6}"
          f" {'known, median':>14} {'worst':>8} {'over, median':>14} {'worst':>8}")
    total = Tally()
    for (kind, backend), tally in sorted(tallies.items()):
        figures = []
        for values in (tally.known_s, tally.over_s):
            figures += [f"{statistics.median(values):.3f} s", f"{max(values):.3f} s"] if values else ["-", "-"]
        print(f"{kind:14} {backend:5} {tally.injected:8} {tally.detected:8} {tally.healed:7} {tally.hangs:6} {tally.leftovers:5}"
              f" {tally.wrong:6} {figures[0]:>14} {figures[1]:>8} {figures[2]:>14} {figures[3]:>8}")
        for name in ("injected", "detected", "healed", "hangs", "leftovers", "wrong"):
            setattr(total, name, getattr(total, name) + getattr(tally, name))
    print(f"{minutes:.1f} min: {total.injected} faults injected, {total.detected} detected, {total.healed} healed by a restart, "
          f"{total.hangs} hangs, {total.leftovers} leftovers, {total.wrong} wrong ends")
    return total


def main():
    minutes = float(sys.argv[2])
    seed = int(sys.argv[3]) if len(sys.argv) > 3 else random.SystemRandom().randrange(1 << 31)
    print(f"seed {seed}", flush=True)
    chance, tallies, start, bad = random.Random(seed), {}, time.monotonic(), []
    while time.monotonic() - start < minutes * 60:
        try:
            trouble = run_one(chance, tallies)
        except AssertionError as wrong:  # it did not even begin
            trouble = f"NO START: {wrong}"
        if trouble:
            bad.append(trouble)
            print(trouble, flush=True)
    total = print_table(tallies, (time.monotonic() - start) / 60)
    sys.exit(1 if bad or total.injected == 0 else 0)


if __name__ == "__main__":
    main()
