"""Training jobs that go wrong, and what is left of them."""
import contextlib
import os
import pathlib
import re
import signal
import subprocess
import threading
import time
import uuid

from support.program import LAUNCHED, LIMIT_S


def processes_of(run_id):
    """Pids of the job's processes that still run, the launcher's too; found by their environment."""
    mark, found = f"TORCHELASTIC_RUN_ID={run_id}".encode(), []
    for folder in pathlib.Path("/proc").glob("[0-9]*"):
        try:
            if mark in (folder / "environ").read_bytes().split(b"\0") and is_alive(int(folder.name)):
                found.append(int(folder.name))
        except OSError:  # it ended meanwhile, or is not ours
            pass
    return found


def is_alive(pid):
    try:
        return pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def program_of(pid):
    """The name that a process was started with; none when it has ended meanwhile."""
    try:
        return pathlib.Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")[0].decode(errors="replace")
    except OSError:
        return ""


def shared_files():
    """What could leak where memory is shared by name."""
    return {str(path) for path in pathlib.Path("/dev/shm").iterdir()}


def shared_memory_of(pid):
    """The anonymous files of ours that a process has mapped, as (device, inode)."""
    try:
        maps = pathlib.Path(f"/proc/{pid}/maps").read_text()
    except OSError:  # it ended meanwhile
        return set()
    return set(re.findall(r" (\w+:\w+ \d+) +/memfd:lockstep", maps))


def listening():
    """The sockets of this host that listen: (port, inode)."""
    lines = (line.split() for line in pathlib.Path("/proc/net/tcp").read_text().splitlines()[1:])
    return {(int(line[1].rpartition(":")[2], 16), line[9]) for line in lines if line[3] == "0A"}


class Training:
    """`lockstep run` of fault_trainer, running. `fault`: (ranks, step, place, kind), for each attempt that has one."""

    def __init__(self, build, ranks, backend, fault=(), steps=60, flags=(), timeout_s=10, program=(), **variables):
        self.run_id, self.ranks = uuid.uuid4().hex[:12], ranks
        self.out, self.err, self.lines = "", "", threading.Condition()
        self.files_before, self.segments, self.sockets = shared_files(), set(), set()
        binary = pathlib.Path(build) / "bin"
        env = {k: v for k, v in os.environ.items() if not LAUNCHED.match(k)}
        env |= {"LOCKSTEP_BACKEND": backend, "LOCKSTEP_TIMEOUT": str(timeout_s), "OMP_NUM_THREADS": "1",
                "GLOO_SOCKET_IFNAME": "lo", **variables}
        words = [binary / "lockstep", "run", "--nproc-per-node", ranks, "--rdzv-id", self.run_id, *flags,
                 *program, binary / "fault_trainer", steps, *fault]
        self.process = subprocess.Popen([str(word) for word in words], env=env, stdin=subprocess.DEVNULL,
                                        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        self.readers = [threading.Thread(target=self._read, args=(name,)) for name in ("out", "err")]
        for reader in self.readers:
            reader.start()

    def _read(self, name):
        for line in getattr(self.process, "std" + name):
            with self.lines:
                setattr(self, name, getattr(self, name) + line)
                self.lines.notify_all()

    def await_line(self, pattern, count=1):
        """Waits until the pattern has come so often on stdout."""
        def enough():
            return len(re.findall(pattern, self.out)) >= count or self.process.poll() is not None
        with self.lines:
            while not enough():
                assert self.lines.wait(LIMIT_S), f"no /{pattern}/ in {LIMIT_S} s: {self}"
        assert len(re.findall(pattern, self.out)) >= count, f"no /{pattern}/: {self}"

    def pids(self):
        """The ranks' processes: the launcher's children that run another program than it does."""
        return [pid for pid in self.children() if program_of(pid).endswith("fault_trainer")]

    def children(self):
        """The launcher's processes; none when it has ended."""
        task = pathlib.Path(f"/proc/{self.process.pid}/task/{self.process.pid}")
        try:
            return [int(pid) for pid in (task / "children").read_text().split()]
        except OSError:
            return []

    def wait(self, limit_s=LIMIT_S):
        """The exit status. A job that does not end is killed, and an AssertionError."""
        try:
            self.status = self.process.wait(limit_s)
        except subprocess.TimeoutExpired:
            self.process.kill()
            raise AssertionError(f"still runs after {limit_s} s: {self}") from None
        self.ended_ns = time.monotonic_ns()
        for reader in self.readers:
            reader.join(LIMIT_S)
        return self.status

    def times(self, word):
        """When a rank said `word`: {rank: ns}, the last time for each."""
        said = re.findall(rf"^\[rank (\d+)\] {word} (\d+)$", self.out, re.MULTILINE)
        return {int(rank): int(ns) for rank, ns in said}

    def note_segments(self):
        """Remembers the memory that the ranks share and the port at which they met, to look for both after the job."""
        for pid in processes_of(self.run_id):
            self.segments |= shared_memory_of(pid)
            try:
                environment = pathlib.Path(f"/proc/{pid}/environ").read_bytes()
            except OSError:  # it ended meanwhile
                continue
            if port := re.search(rb"\0MASTER_PORT=(\d+)", environment):
                self.sockets |= {socket for socket in listening() if socket[0] == int(port[1])}

    def leftovers(self):
        """Whatever the job has left, in words."""
        left = [f"process {pid}" for pid in processes_of(self.run_id)]
        if self.segments:
            left += [f"shared memory in process {folder.name}" for folder in pathlib.Path("/proc").glob("[0-9]*")
                     if shared_memory_of(folder.name) & self.segments]
        left += [f"port {port}" for port, _ in self.sockets & listening()]
        left += [f"file {name}" for name in self.files_left()]
        return left

    def files_left(self):
        """New files of ours. Tests that run beside this one have theirs for a moment."""
        end = time.monotonic() + 20
        while True:
            left = {name for name in shared_files() - self.files_before if self.run_id in name or "lockstep" in name}
            if not left or time.monotonic() > end:
                return left
            time.sleep(0.05)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.end()

    def end(self):
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGKILL)
        for pid in processes_of(self.run_id):
            with contextlib.suppress(ProcessLookupError):  # it has ended meanwhile
                os.kill(pid, signal.SIGKILL)

    def __str__(self):
        return f"{self.process.args}\n--- stdout\n{self.out}--- stderr\n{self.err}"
