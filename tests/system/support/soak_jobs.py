"""One training job of the soak, and the faults that it meets: on this host, or on two pretend ones
whose cable is pulled."""

import os
import pathlib
import re
import signal
import tempfile
import time

from support.hosts import Hosts
from support.training import Training, is_alive

HANG_S = 90  # nothing here takes that long, on however busy a machine
TIMEOUT_S = 8  # a collective's deadline: ranks of a busy machine may be seconds apart
STEPS = 60  # of the attempt that trains to its end
MOST_FAULTS = 4  # of a job, one in each attempt
PLACES = ["loader", "forward", "backward", "optimizer", "barrier"]
OUTSIDE = {
    "kill": signal.SIGKILL,
    "kill two": signal.SIGKILL,
    "stop": signal.SIGSTOP,
    "kill launcher": signal.SIGKILL,
    "stop launcher": signal.SIGTERM,
}
MISMATCHES = ["count", "dtype", "root", "collective", "skip"]
# The exit status of a job that ends with it.
STATUS = {
    "kill": 137,
    "kill two": 137,
    "stop": 1,
    "kill launcher": -9,
    "stop launcher": 143,
    "throw": 3,
    "segv": 139,
    "abort": 134,
    "exit7": 7,
    "exit0": 1,
} | dict.fromkeys(MISMATCHES, 1)
PARTITIONS = ["cable", "first cable", "one way", "reset"]
# Ranks whose connections have broken may be seen to fail before the launchers miss each other.
LOST = re.compile(r"was lost|lost the connection|coordinator .* has ended|failed first")
HEARTBEAT_S = 2  # after which a silent launcher is lost
LAUNCHERS = (
    f"heartbeat_timeout={HEARTBEAT_S},keep_alive_interval=0.2,last_call_timeout=0.2,"
    "join_timeout=60,rejoin_timeout=30"
)


class Trouble(Exception):
    """`what` is hangs, leftovers or wrong."""

    def __init__(self, what, text):
        super().__init__(text)
        self.what = what


def times(text, word):
    return [int(ns) for ns in re.findall(rf"\] {word} (\d+)$", text, re.MULTILINE)]


def await_that(true, ended, text):
    """Until true(); Trouble when the job has ended without, or after HANG_S."""
    end = time.monotonic() + HANG_S
    while not true():
        over = ended()  # before the last look: what it has said by then counts
        if over and not true():
            raise Trouble("wrong", f"the job ended before it went on: {text()}")
        if time.monotonic() > end:
            raise Trouble("hangs", f"nothing after {HANG_S} s: {text()}")
        time.sleep(0.005)


class Counter:
    """Counts the faults of one job, each as one of its kind."""

    def __init__(self, tally, where):
        self.tally, self.where, self.kind, self.at, self.open = tally, where, "start", 0, False

    def inject(self, kind, at):
        self.kind, self.at, self.open = kind, at, True
        self.tally.count(kind, self.where, "injected")

    def settle(self, said, end_name, end_ns):
        """The fault was detected; `said` is all that the ranks have said so far."""
        known = [ns for ns in times(said, "known") if ns >= self.at]
        seconds = {"known": (max(known) - self.at) * 1e-9} if known else {}
        self.tally.count(
            self.kind, self.where, "detected", **seconds, **{end_name: (end_ns - self.at) * 1e-9}
        )
        if end_name == "again":
            self.tally.count(self.kind, self.where, "healed")
        self.open = False


def plan_faults(chance):
    """Kinds, the last of which may be the launcher's end. Neighbours differ: a rank that fails in one
    way again and again is a crash loop, which ends a job."""
    kinds = []
    for _ in range(chance.randint(1, MOST_FAULTS)):
        kinds.append(
            chance.choice(
                [kind for kind in STATUS if not kinds or STATUS[kind] != STATUS[kinds[-1]]]
            )
        )
        if "launcher" in kinds[-1]:
            break
    return kinds


def run_on_one_host(chance, build, tally):
    backend, ranks = chance.choice(["shm", "tcp"]), chance.choice([2, 2, 3, 4])
    kinds = plan_faults(chance)
    victims = [chance.randrange(ranks) for _ in kinds]
    # Some jobs go on after the last fault, and train to their end.
    restarts = len(kinds) - 1
    if "launcher" not in kinds[-1] and chance.random() < 0.3:
        restarts += 1
    faults = []
    for kind, victim in zip(kinds, victims):
        place = "barrier" if kind in MISMATCHES else chance.choice(PLACES)
        faults += (
            [victim, 0, "", "outside"]
            if kind in OUTSIDE
            else [victim, chance.randrange(0, 40), place, kind]
        )
    counter = Counter(tally, backend)
    with tempfile.TemporaryDirectory(prefix="lockstep-soak-") as folder:
        job = Training(
            build,
            ranks,
            backend,
            faults,
            steps=STEPS,
            flags=("--max-restarts", restarts),
            timeout_s=TIMEOUT_S,
            TMPDIR=folder,
        )
        text = (
            f"{dict(zip(kinds, victims))} on {ranks} ranks, {backend}, {restarts} restarts: "
            f"{job.run_id}"
        )
        try:
            for done, (kind, victim) in enumerate(zip(kinds, victims)):
                said_before = sum(before not in OUTSIDE for before in kinds[:done])
                one_fault(chance, job, counter, kind, victim, said_before, heals=done < restarts)
            if restarts == len(kinds):
                job.status = job_end(job)
                if job.status != 0 or "done" not in job.out:
                    raise Trouble("wrong", f"status {job.status} after the last restart")
            if left := job.leftovers() + [f"file {name}" for name in os.listdir(folder)]:
                raise Trouble("leftovers", ", ".join(left))
        except Trouble as trouble:
            tally.count(counter.kind, backend, trouble.what)
            return f"{trouble.what.upper()}: {counter.kind} of {text}: {trouble}\n{job}"
        finally:
            job.end()
    return None


def one_fault(chance, job, counter, kind, victim, said_before, heals):
    ran = lambda: times(job.out, "training")  # noqa: E731
    ended = lambda: job.process.poll() is not None and not any(
        reader.is_alive() for reader in job.readers
    )  # noqa: E731
    pids = []
    if kind in OUTSIDE:
        # A few meet a job that is just starting.
        if chance.random() < 0.8:
            await_that(lambda: ran() and ran()[-1] > counter.at, ended, lambda: job)
        await_that(lambda: len(job.pids()) == job.ranks, ended, lambda: job)
        time.sleep(0.5 * chance.random())
        pids = job.pids()
        job.note_segments()
        at = send(job, kind, victim, pids)
    else:
        await_that(lambda: len(times(job.out, "fault")) > said_before, ended, lambda: job)
        at = times(job.out, "fault")[said_before]
        job.note_segments()
    counter.inject(kind, at)
    if heals:
        await_that(lambda: ran() and ran()[-1] > at, ended, lambda: job)
        counter.settle(job.out, "again", ran()[-1])
        if alive := [pid for pid in pids if is_alive(pid)]:
            raise Trouble("leftovers", f"processes {alive} of the attempt before")
        return
    status = job_end(job)
    if kind == "kill launcher":
        end = time.monotonic() + 5  # its ranks have no father any more
        while job.leftovers() and time.monotonic() < end:
            time.sleep(0.005)
        job.ended_ns = time.monotonic_ns()
    if status != STATUS[kind]:
        raise Trouble("wrong", f"status {status}, expected {STATUS[kind]}")
    counter.settle(job.out, "over", job.ended_ns)


def send(job, kind, victim, pids):
    """Does it; returns when, in ns."""
    at = time.monotonic_ns()
    if "launcher" in kind:
        job.process.send_signal(OUTSIDE[kind])
        return at
    others = {pids[(victim + 1) % len(pids)]} if kind == "kill two" else set()
    for pid in {pids[victim]} | others:
        if is_alive(pid):
            os.kill(pid, OUTSIDE[kind])
    return at


def job_end(job):
    try:
        return job.wait(HANG_S)
    except AssertionError as hang:
        raise Trouble("hangs", str(hang)) from None


def run_on_two_hosts(chance, build, tally):
    """A launcher on each; the way between them is interrupted, and given back where the job is to go
    on."""
    ranks = chance.choice([1, 2])
    kinds = [chance.choice(PARTITIONS[:3]) for _ in range(chance.randint(1, 2))]
    # Who is told by the first host's kernel that nobody listens there does not look for it any
    # longer.
    if chance.random() < 0.25:
        kinds[-1] = "reset"
    counter = Counter(tally, "hosts")
    text = f"{kinds}, {ranks} ranks on each of 2 hosts"
    with tempfile.TemporaryDirectory(prefix="lockstep-soak-") as folder, Hosts(folder, 2) as hosts:
        faults = ["0", 0, "", "outside"] * len(kinds)
        program = [pathlib.Path(build) / "bin/fault_trainer", STEPS, *faults]
        both = [
            hosts.launch(
                host,
                pathlib.Path(build) / "bin/lockstep",
                "run",
                "--nnodes",
                2,
                "--nproc-per-node",
                ranks,
                "--rdzv-endpoint",
                "host1:29400",
                "--rdzv-conf",
                LAUNCHERS,
                "--max-restarts",
                len(kinds) - 1,
                *program,
                LOCKSTEP_TIMEOUT="20",
            )
            for host in (1, 2)
        ]
        said = lambda: both[0].text + both[1].text  # noqa: E731
        ended = lambda: all(launcher.status is not None for launcher in both)  # noqa: E731
        try:
            for done, kind in enumerate(kinds):
                await_that(
                    lambda: times(said(), "training")
                    and times(said(), "training")[-1] > counter.at,
                    ended,
                    said,
                )
                time.sleep(0.3 * chance.random())
                before = [len(launcher.text) for launcher in both]
                counter.inject(kind, time.monotonic_ns())
                interrupt(chance, hosts, kind)
                if len(kinds) > 1:  # with restarts they would look for each other for long
                    await_that(
                        lambda: all(
                            LOST.search(launcher.text, begin)
                            for launcher, begin in zip(both, before)
                        ),
                        ended,
                        said,
                    )
                    restore(hosts)
                if done < len(kinds) - 1:
                    await_that(lambda: times(said(), "training")[-1] > counter.at, ended, said)
                    counter.settle(said(), "again", times(said(), "training")[-1])
            await_that(ended, ended, said)
            if {launcher.status for launcher in both} != {1}:
                raise Trouble(
                    "wrong", f"statuses {[launcher.status for launcher in both]}, expected 1"
                )
            counter.settle(said(), "over", int(max(launcher.ended_at for launcher in both) * 1e9))
            try:
                hosts.expect_nothing_left()
            except AssertionError as left:
                raise Trouble("leftovers", str(left)) from None
        except Trouble as trouble:
            tally.count(counter.kind, "hosts", trouble.what)
            return (
                f"{trouble.what.upper()}: {counter.kind} of {text}: {trouble}\n{both[0]}\n{both[1]}"
            )
    return None


def interrupt(chance, hosts, kind):
    one, other = chance.choice([(1, 2), (2, 1)])
    if kind == "cable":
        hosts.do("cut", 2)
    elif kind == "first cable":
        hosts.do("cut", 1)
    else:
        hosts.do("drop" if kind == "one way" else "reset", one, other)


def restore(hosts):
    for host in (1, 2):
        hosts.do("mend", host)
    hosts.do("undrop")
