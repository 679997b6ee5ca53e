"""Pretend hosts, and launchers that run on them."""
import os
import pathlib
import re
import signal
import subprocess
import sys
import threading
import time

from support.program import LAUNCHED, LIMIT_S

SCRIPT = pathlib.Path(__file__).parent / "hosts.sh"
TOKEN = "a token that only the tests of this folder know"


class Hosts:
    """`count` hosts, host1 at 10.77.0.1 and so on, while the `with` block runs."""

    def __init__(self, folder, count):
        self.folder, self.count, self.launchers = folder + "/hosts", count, []

    def __enter__(self):
        self.do("up", self.count)
        return self

    def __exit__(self, *_):
        self.do("down")
        for launcher in self.launchers:
            launcher.end()

    def do(self, verb, *words, limit_s=LIMIT_S):
        words = [str(word) for word in (SCRIPT, verb, self.folder, *words)]
        done = subprocess.run(words, capture_output=True, text=True, timeout=limit_s)
        assert done.returncode == 0, f"{' '.join(words)}: {done.stdout}{done.stderr}"
        return done.stdout

    def on(self, host, *words, **limit):
        """Runs a command there to its end; returns what it printed."""
        return self.do("run", host, *words, **limit)

    def launch(self, host, *words, token=TOKEN, **variables):
        """Starts a program there."""
        words = [str(word) for word in (SCRIPT, "run", self.folder, host, *words)]
        environment = {name: value for name, value in os.environ.items() if not LAUNCHED.match(name)}
        environment |= {"LOCKSTEP_TOKEN": token, "OMP_NUM_THREADS": "1"} | variables
        self.launchers.append(Launcher(words, environment))
        return self.launchers[-1]

    def start_ranks(self, command, each, **variables):
        """Starts `each` ranks on every host, without a launcher; returns the processes by rank."""
        clean = {name: value for name, value in os.environ.items() if not LAUNCHED.match(name)}
        ranks = []
        for rank in range(self.count * each):
            place = {"RANK": rank, "WORLD_SIZE": self.count * each, "LOCAL_RANK": rank % each, "LOCAL_WORLD_SIZE": each,
                     "MASTER_ADDR": "10.77.0.1", "MASTER_PORT": 29700, "OMP_NUM_THREADS": 1}
            ranks.append(subprocess.Popen(
                [SCRIPT, "run", self.folder, str(rank // each + 1), *map(str, command)], text=True,
                env=clean | {name: str(value) for name, value in place.items()} | variables, stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE, stderr=subprocess.PIPE))
        return ranks

    def processes(self, host):
        """The names of the processes there, but for the host's own and those that look."""
        own = {"bash", "sleep", "ps", "hosts-init"}
        return sorted(set(self.on(host, "ps", "-A", "-o", "comm=").split()) - own)

    def expect_nothing_left(self):
        for host in range(1, self.count + 1):
            assert self.processes(host) == [], f"host{host} still runs {self.processes(host)}"
            listening = self.on(host, "ss", "-Htln")
            assert listening == "", f"somebody still listens on host{host}: {listening}"
            shared = self.on(host, "ls", "/dev/shm")
            assert shared == "", f"left in host{host}'s /dev/shm: {shared}"


class Launcher:
    """A program whose output can be waited for."""

    def __init__(self, words, environment):
        self.words, self.text, self.status, self.ended_at = words, "", None, None
        self.changed = threading.Condition()
        self.process = subprocess.Popen(words, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                                        stderr=subprocess.STDOUT, text=True, start_new_session=True)
        self.reader = threading.Thread(target=self.read, daemon=True)
        self.reader.start()

    def read(self):
        for line in self.process.stdout:
            with self.changed:
                self.text += line
                self.changed.notify_all()
        status = self.process.wait()
        with self.changed:
            self.status, self.ended_at = status, time.monotonic()
            self.changed.notify_all()

    def await_text(self, pattern, count=1):
        """Until lines that match have come so many times."""
        def seen():
            return len(re.findall(pattern, self.text, re.MULTILINE)) >= count

        with self.changed:
            self.changed.wait_for(lambda: seen() or self.status is not None, LIMIT_S)
            assert seen(), f"no /{pattern}/ ({count} times) in:\n{self}"

    def await_end(self):
        with self.changed:
            assert self.changed.wait_for(lambda: self.status is not None, LIMIT_S), f"still runs:\n{self}"
        return self.status

    def expect(self, status, *patterns):
        self.await_end()
        assert self.status == status, f"expected exit status {status}:\n{self}"
        for pattern in patterns:
            assert re.search(pattern, self.text, re.MULTILINE), f"expected /{pattern}/:\n{self}"

    def end(self):
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
        self.reader.join(LIMIT_S)

    def __str__(self):
        return f"$ {' '.join(self.words)}\nexit status {self.status}\n{self.text}"


def report(text):
    """A measurement, for whoever reads the log."""
    print("    ", text, file=sys.stderr, flush=True)
