"""Jobs of the soak in which the launcher's own world goes wrong: the launcher, its guard, the disk
of its log files, the reader of its output, the first moments of a job, launchers of two and three
pretend hosts."""

import os
import pathlib
import signal
import subprocess
import tempfile
import time

from support.hosts import Hosts
from support.soak_jobs import (
    HANG_S,
    HEARTBEAT_S,
    LAUNCHERS,
    STATUS,
    STEPS,
    TIMEOUT_S,
    Counter,
    Trouble,
    await_that,
    job_end,
    send,
    times,
)
from support.training import Training, is_alive

# What does not end a job; a fault that does, of ENDS, follows at once.
HARMLESS = [
    "kill guard",
    "stop guard",
    "pause launcher",
    "full disk",
    "stalled disk",
    "stalled reader",
]
ENDS = ["kill", "stop launcher", "kill launcher"]
MOST_TEXT = 4000  # of a job that went wrong, for the log
FLOOD = 'until test -e "$GO"; do sleep 0.02; done; yes "$(printf %01000d 0)" | head -c 5000000'
# In the place of a log file of the next attempt there is a pipe, and rank 1 writes more to it than
# a pipe holds.
STALL = (
    "if test $RANK = 1; then if test $TORCHELASTIC_RESTART_COUNT = 0; then "
    "next=$(dirname $(dirname $(dirname $TORCHELASTIC_ERROR_FILE)))/attempt_1/1; "
    "mkdir -p $next; mkfifo $next/stderr.log; "
    'else yes "$(printf %01000d 0)" | head -c 3000000 >&2 & fi; fi; exec "$@"'
)


class Held(Training):
    """Its output is read until hold(), and again after the end."""

    def __init__(self, *words, **more):
        self.holds, self.unread = False, None
        super().__init__(*words, **more)

    def _read(self, name):
        for line in getattr(self.process, "std" + name):
            while self.holds and name == "out":
                time.sleep(0.01)
            with self.lines:
                setattr(self, name, getattr(self, name) + line)
                self.lines.notify_all()


def guard_of(job):
    children, ranks = job.children(), set(job.pids())
    return [pid for pid in children if pid not in ranks]


def check_nothing_left(job, folder, patience_s=5):
    """The kernel, or the guard, ends what a killed launcher leaves."""
    end = time.monotonic() + patience_s
    while job.leftovers() and time.monotonic() < end:
        time.sleep(0.01)
    if left := job.leftovers() + [
        f"file {name}" for name in os.listdir(folder) if name not in ("go", "logs")
    ]:
        raise Trouble("leftovers", ", ".join(left))


def run_with_trouble_around(chance, build, tally):
    """One harmless fault, then one that ends the job as always."""
    kind, last = chance.choice(HARMLESS), chance.choice(ENDS)
    ranks = chance.choice([2, 3])
    counter = Counter(tally, "around")
    with tempfile.TemporaryDirectory(prefix="lockstep-soak-") as folder:
        go, logs = pathlib.Path(folder) / "go", pathlib.Path(folder) / "logs"
        flags, program, faults = ["--grace", 1], [], [0, 0, "", "outside"]
        if kind == "full disk":
            logs.mkdir()
            subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "full", logs], check=True)
            flags += ["--tee", "3", "--log-dir", logs]
        if kind == "stalled disk":
            flags += ["--tee", "3", "--log-dir", logs, "--max-restarts", 1]
            program, faults = ["sh", "-c", STALL, "sh"], faults * 2
        if kind == "stalled reader":
            program = ["sh", "-c", f'({FLOOD}) & exec "$@"', "sh"]
        job = Held(
            build,
            ranks,
            chance.choice(["shm", "gloo"]),
            faults,
            steps=STEPS,
            flags=flags,
            program=program,
            timeout_s=TIMEOUT_S,
            TMPDIR=folder,
            GO=str(go),
            LOCKSTEP_OUTPUT_TIMEOUT="2",
        )
        text = f"{kind}, {last} on {ranks} ranks: {job.run_id}"
        try:
            meet(chance, job, counter, kind, last, go, logs)
            check_nothing_left(job, folder)
        except Trouble as trouble:
            tally.count(counter.kind, "around", trouble.what)
            said = str(trouble)[:MOST_TEXT]
            return f"{trouble.what.upper()}: {text}: {said}\n{str(job)[-MOST_TEXT:]}"
        finally:
            job.holds = False
            job.end()
            if job.unread is not None:
                os.close(job.unread)
            if kind == "full disk":
                subprocess.run(["umount", "-l", logs], check=True)
    return None


def await_training(job, after=0):
    ended = lambda: job.process.poll() is not None and not any(
        reader.is_alive() for reader in job.readers
    )  # noqa: E731
    await_that(
        lambda: times(job.out, "training") and times(job.out, "training")[-1] > after,
        ended,
        lambda: job,
    )
    await_that(lambda: len(job.pids()) == job.ranks, ended, lambda: job)
    time.sleep(0.2 * chance_of(job))


def chance_of(job):
    return int(job.run_id[:4], 16) / 0xFFFF


def meet(chance, job, counter, kind, last, go, logs):
    await_training(job)
    job.note_segments()
    guards = guard_of(job)
    counter.inject(kind, time.monotonic_ns())
    if kind == "kill guard" or kind == "stop guard":
        for pid in guards:
            os.kill(pid, signal.SIGKILL if kind == "kill guard" else signal.SIGSTOP)
    elif kind == "pause launcher":
        job.process.send_signal(signal.SIGSTOP)
        time.sleep(0.5 * chance.random())
        job.process.send_signal(signal.SIGCONT)
    elif kind == "full disk":
        subprocess.run(
            ["dd", "if=/dev/zero", f"of={logs}/filler", "bs=4k"], stderr=subprocess.DEVNULL
        )
    elif kind == "stalled reader":
        job.holds = True
        go.touch()
        time.sleep(0.5 * chance.random())
    elif kind == "stalled disk":
        await_that(
            lambda: list(logs.glob("*/attempt_1/1/stderr.log")), lambda: False, lambda: "no pipe"
        )
        job.unread = os.open(
            next(logs.glob("*/attempt_1/1/stderr.log")), os.O_RDONLY | os.O_NONBLOCK
        )
        before = set(job.pids())
        os.kill(job.pids()[0], signal.SIGKILL)
        # What the ranks say may wait for the disk; how the job ends may not.
        await_that(
            lambda: len(set(job.pids()) - before) == job.ranks,
            lambda: job.process.poll() is not None,
            lambda: job,
        )
        time.sleep(2 * chance.random())
        job.note_segments()
    if job.process.poll() is not None:
        raise Trouble("wrong", "the job ended of it")
    counter.settle(job.out, "over", time.monotonic_ns())
    finish(chance, job, counter, last)
    # Who had to be killed with the launcher is not there to do its work.
    if kind == "stop guard" or (last == "kill launcher" and kind != "kill guard"):
        for pid in guards:
            if is_alive(pid) and kind == "stop guard":
                os.kill(pid, signal.SIGCONT)


def finish(chance, job, counter, last):
    pids = job.pids()
    at = send(job, last, chance.randrange(len(pids)), pids)
    counter.inject(last, at)
    status = ended_with(job)
    if status != STATUS[last]:
        raise Trouble("wrong", f"status {status}, expected {STATUS[last]}")
    counter.settle(job.out, "over", job.ended_ns)


def ended_with(job):
    """The status; what the launcher has left unread is taken afterwards."""
    try:
        job.process.wait(HANG_S)
    except subprocess.TimeoutExpired:
        raise Trouble("hangs", f"the launcher still runs after {HANG_S} s") from None
    finally:
        job.holds = False
    return job_end(job)


def run_in_the_start(chance, build, tally):
    """A signal in the first moments: before the launcher hears signals, between two ranks, while
    ranks meet."""
    kind = chance.choice(
        ["start: SIGTERM", "start: SIGINT", "start: kill launcher", "start: kill rank"]
    )
    counter = Counter(tally, "start")
    with tempfile.TemporaryDirectory(prefix="lockstep-soak-") as folder:
        ranks = chance.choice([2, 3, 8])
        job = Training(
            build,
            ranks,
            chance.choice(["shm", "gloo"]),
            [0, 0, "", "outside"],
            flags=("--grace", 1),
            timeout_s=TIMEOUT_S,
            TMPDIR=folder,
        )
        try:
            time.sleep(chance.choice([0.01, 0.1, 0.5, 2]) * chance.random())
            if kind == "start: kill rank":
                await_that(job.pids, lambda: job.process.poll() is not None, lambda: job)
            job.note_segments()
            counter.inject(kind, time.monotonic_ns())
            if kind == "start: kill rank":
                os.kill(chance.choice(job.pids()), signal.SIGKILL)
                allowed = {137}
            else:
                number = {"SIGTERM": signal.SIGTERM, "SIGINT": signal.SIGINT}.get(
                    kind[7:], signal.SIGKILL
                )
                job.process.send_signal(number)
                allowed = {-number, 128 + number}
            if (status := ended_with(job)) not in allowed:
                raise Trouble("wrong", f"status {status}, expected one of {allowed}")
            check_nothing_left(job, folder)
            counter.settle(job.out, "over", job.ended_ns)
        except Trouble as trouble:
            tally.count(kind, "start", trouble.what)
            said = str(trouble)[:MOST_TEXT]
            return (
                f"{trouble.what.upper()}: {kind} on {ranks} ranks: {said}\n"
                f"{str(job)[-MOST_TEXT:]}"
            )
        finally:
            job.end()
    return None


# Statuses on the host of the fault and on the others. A launcher that is killed, or a coordinator
# that is gone, is status 1 elsewhere.
ON_HOSTS = {
    "kill launcher": ({-9, 137}, {1}),
    "kill coordinator": ({-9, 137}, {1}),
    "SIGTERM": ({143}, {143}),
    "SIGINT": ({130}, {130}),
    "kill rank": ({137}, {137}),
    "power off": (None, {1}),
    "pause launcher": ({143}, {143}),
    "SIGTERM after a failure": None,
}


def run_launchers_of_hosts(chance, build, tally):
    """Two or three hosts; something happens to one of their launchers, in training or in the first
    moments."""
    count, kind = chance.choice([2, 2, 3]), chance.choice(list(ON_HOSTS))
    early = (
        kind in ("SIGTERM", "SIGINT", "kill launcher", "kill coordinator") and chance.random() < 0.3
    )
    host = (
        1
        if kind == "kill coordinator"
        else chance.randint(2 if kind in ("kill launcher", "power off") else 1, count)
    )
    counter = Counter(tally, f"hosts{count}")
    binary = pathlib.Path(build) / "bin"
    with tempfile.TemporaryDirectory(prefix="lockstep-soak-") as folder, Hosts(
        folder, count
    ) as hosts:
        flags = ["--max-restarts", 3] if kind == "SIGTERM after a failure" else []
        all_of = [
            hosts.launch(
                one,
                binary / "lockstep",
                "run",
                "--nnodes",
                count,
                "--nproc-per-node",
                1,
                "--rdzv-endpoint",
                "host1:29400",
                "--rdzv-conf",
                LAUNCHERS,
                "--grace",
                1,
                *flags,
                binary / "fault_trainer",
                STEPS,
                0,
                0,
                "",
                "outside",
                0,
                0,
                "",
                "outside",
                LOCKSTEP_TIMEOUT="20",
            )
            for one in range(1, count + 1)
        ]
        said = lambda: "".join(map(str, all_of))  # noqa: E731
        ended = lambda: all(launcher.status is not None for launcher in all_of)  # noqa: E731
        try:
            if early:
                time.sleep(chance.random())
            else:
                await_that(lambda: times(all_of[0].text + all_of[-1].text, "training"), ended, said)
                time.sleep(0.3 * chance.random())
            counter.inject(kind, time.monotonic_ns())
            may_be_lost = happen(chance, hosts, kind, host, count)
            if early:  # whoever had not met the others would wait for them
                time.sleep(1)
                for one in range(1, count + 1):
                    signal_launcher(hosts, one, "TERM")
            await_that(ended, ended, said)
            if not early:
                check_statuses(kind, host, all_of, {1} if may_be_lost else set())
            for one in range(1, count + 1):
                if kind == "power off" and one == host:
                    continue
                await_that(
                    lambda: not hosts.processes(one),
                    lambda: False,
                    lambda: f"leftovers {hosts.processes(one)}",
                )
            counter.settle(said(), "over", time.monotonic_ns())
        except Trouble as trouble:
            tally.count(counter.kind, f"hosts{count}", trouble.what)
            when = ", early" if early else ""
            return (
                f"{trouble.what.upper()}: {kind} on host{host} of {count}{when}: {trouble}\n"
                f"{said()}"
            )
        except AssertionError as wrong:
            tally.count(counter.kind, f"hosts{count}", "leftovers")
            return f"LEFTOVERS: {kind} on host{host} of {count}: {wrong}\n{said()}"
    return None


def check_statuses(kind, host, all_of, also):
    """`also`: statuses that are right on every host beside those of the fault."""
    statuses = [launcher.status for launcher in all_of]
    if kind == "SIGTERM after a failure":
        wrong = set(statuses) - {143}
    else:
        own, others = ON_HOSTS[kind]
        wrong = {
            status
            for index, status in enumerate(statuses)
            if index + 1 != host and status not in others
        }
        wrong |= set() if own is None or statuses[host - 1] in own else {statuses[host - 1]}
    if wrong - also:
        raise Trouble("wrong", f"statuses {statuses}")


def signal_launcher(hosts, host, name):
    """The guard's parent is the launcher: the oldest of that name."""
    hosts.on(host, "sh", "-c", f"pkill -{name} -o -x lockstep || true")


def happen(chance, hosts, kind, host, count):
    """Whether the launcher of a host may have been silent for so long that it is lost."""
    if kind == "power off":
        hosts.do("off", host)
    elif kind == "kill rank":
        hosts.on(host, "sh", "-c", "pkill -KILL -o -x fault_trainer")
    elif kind == "pause launcher":  # for less than the heartbeat timeout
        begin = time.monotonic()
        signal_launcher(hosts, host, "STOP")
        time.sleep(0.3 * chance.random())
        hosts.do("thaw", host)  # nsenter, too, which stops with it
        paused_s = time.monotonic() - begin
        time.sleep(0.2)
        signal_launcher(hosts, host, "TERM")
        return paused_s > HEARTBEAT_S / 2  # on a machine too busy for this program
    elif kind == "SIGTERM after a failure":
        hosts.on(host, "sh", "-c", "pkill -KILL -o -x fault_trainer")
        time.sleep(0.9 * chance.random())
        signal_launcher(hosts, chance.randint(1, count), "TERM")
    else:
        signal_launcher(hosts, host, {"SIGTERM": "TERM", "SIGINT": "INT"}.get(kind, "KILL"))
    return False
