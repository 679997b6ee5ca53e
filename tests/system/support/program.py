"""What tests that drive whole programs share."""
import os
import re
import shutil
import socket
import subprocess
import tempfile

LIMIT_S = 180  # a program that takes longer hangs; the machine may be busy
LAUNCHED = re.compile(r"^(RANK|WORLD_SIZE|LOCAL_|MASTER_|GROUP_|ROLE_|TORCHELASTIC_|PET_|LOCKSTEP_|LD_LIBRARY_PATH|"
                      r"FASHION_MNIST)")


class Outcome:
    def __init__(self, words, done):
        self.words, self.status, self.out, self.err = words, done.returncode, done.stdout, done.stderr

    def __str__(self):
        return f"$ {' '.join(self.words)}\nexit status {self.status}\n--- stdout\n{self.out}--- stderr\n{self.err}"

    def expect(self, status=0, out=None, err=None):
        """Checks the status, and patterns in the two streams; returns the last pattern's match in stdout."""
        assert self.status == status, f"expected exit status {status}:\n{self}"
        match = None
        for pattern, text in ((out, self.out), (err, self.err)):
            for one in [pattern] if isinstance(pattern, str) else pattern or []:
                found = re.search(one, text, re.MULTILINE)
                assert found, f"expected /{one}/:\n{self}"
                match = found if text is self.out else match
        return match


def run(*words, limit_s=LIMIT_S, **variables):
    """Runs a program to its end in an environment without a launcher's variables; None unsets one.

    With one thread a rank unless said: on a busy machine threads of OpenMP wait for each other for minutes.
    """
    words = [str(word) for word in words]
    environment = {name: value for name, value in os.environ.items() if not LAUNCHED.match(name)}
    environment |= {"OMP_NUM_THREADS": "1"} | variables
    environment = {name: value for name, value in environment.items() if value is not None}
    try:
        return Outcome(words, subprocess.run(words, env=environment, stdin=subprocess.DEVNULL, capture_output=True,
                                             text=True, timeout=limit_s))
    except subprocess.TimeoutExpired as late:
        raise AssertionError(f"{' '.join(words)} still runs after {limit_s} s: {late.stdout}\n{late.stderr}") from None


def free_port():
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return one.getsockname()[1]


def run_cases(cases):
    """Runs each function; each gets a folder of its own, gone afterwards. Exits with 1 when one fails."""
    failed = 0
    for case in cases:
        folder = tempfile.mkdtemp(prefix="lockstep-test-")
        try:
            case(folder)
            print("passed", case.__name__, flush=True)
        except AssertionError as wrong:
            failed += 1
            print("FAILED", case.__name__, wrong, flush=True)
        finally:
            shutil.rmtree(folder)
    assert cases, "no tests ran"
    raise SystemExit(1 if failed else 0)
