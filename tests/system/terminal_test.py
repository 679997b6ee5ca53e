"""What the launcher tells ranks of the terminal in which it was started.

python3 terminal_test.py SOURCE_DIR BUILD_DIR
"""
import fcntl
import os
import pathlib
import pty
import re
import struct
import subprocess
import sys
import termios

from support.program import LAUNCHED, LIMIT_S, run, run_cases

LOCKSTEP = pathlib.Path(sys.argv[2]).resolve() / "bin/lockstep"
COLUMNS_OF_RANKS = ["--nproc-per-node", "2", "sh", "-c", "echo \"<$LOCKSTEP_COLUMNS>\""]


def in_terminal(columns, *words, **variables):
    """Everything that the program writes to a terminal of so many columns."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    environment = {name: value for name, value in os.environ.items() if not LAUNCHED.match(name)}
    environment |= {"OMP_NUM_THREADS": "1", "TERM": "xterm"} | variables
    process = subprocess.Popen(
        [str(word) for word in words],
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=theirs,
        stderr=theirs,
    )
    os.close(theirs)
    written = b""
    while True:
        try:
            part = os.read(ours, 65536)
        except OSError:  # nobody has the terminal any more
            break
        if not part:
            break
        written += part
    os.close(ours)
    assert process.wait(timeout=LIMIT_S) == 0, written.decode()
    return written.decode().replace("\r\n", "\n")


def test_ranks_are_told_how_wide_their_terminal_is(folder):
    told = lambda text: re.findall(r"<(\d*)>", text)
    ranks = COLUMNS_OF_RANKS
    tagged = ["--log-line-prefix-template", "r${rank}:"]
    assert told(in_terminal(80, LOCKSTEP, "run", *ranks)) == ["71", "71"]
    assert told(in_terminal(60, LOCKSTEP, "run", *tagged, *ranks)) == ["57", "57"]
    # Of an outer launcher, or where nothing can be written over, or a file gets it, too.
    dumb = {"TERM": "dumb", "LOCKSTEP_COLUMNS": "9"}
    assert told(in_terminal(80, LOCKSTEP, "run", *ranks, **dumb)) == ["", ""]
    copied = ["--log-dir", folder, "--tee", "1"]
    assert told(in_terminal(80, LOCKSTEP, "run", *copied, *ranks)) == ["", ""]
    assert told(run(LOCKSTEP, "run", *COLUMNS_OF_RANKS, LOCKSTEP_COLUMNS="9").out) == ["", ""]


if __name__ == "__main__":
    run_cases([test_ranks_are_told_how_wide_their_terminal_is])
