"""What the launcher tells ranks of the terminal in which it was started, and what a training shows there.

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


def test_a_rollout_shows_how_far_it_is(folder):
    small = ["--order", "airline", "--iterations", "2", "--warm-steps", "2", "--eval-tasks", "64", "--no-cache"]
    shown = in_terminal(100, LOCKSTEP.parent / "three_domain", "--num-gpus", 1, *small, "--output-dir", folder + "/run")
    line = r"evaluation of airline after no stage: played \d+ of 256 episodes, \d+ tokens/s\x1b\[K\r"
    assert re.search(line, shown), shown
    assert "stage_1_airline iteration 2: reward" in shown, shown  # elsewhere every tenth has a line


def test_a_job_in_the_background_leaves_what_is_typed_to_the_shell(_):
    cat = f"{LOCKSTEP} run --nproc-per-node 2 cat"
    script = f'set -m; {cat} & wait $!; read line; echo "the shell has $line"; read line; {cat}'
    process, terminal = pty.fork()
    if process == 0:
        environment = {name: value for name, value in os.environ.items() if not LAUNCHED.match(name)}
        os.execve("/bin/sh", ["sh", "-c", script], environment | {"OMP_NUM_THREADS": "1"})
    os.write(terminal, b"first\n\x04second\n\x04\x04")  # \x04: the end of the input, for one reader
    written = b""
    try:
        while part := os.read(terminal, 65536):
            written += part
    except OSError:  # nobody has the terminal any more
        pass
    os.close(terminal)
    os.waitpid(process, 0)
    lines = re.sub(r"\x1b\[[\d;]*[A-Za-z]", "", written.decode()).splitlines()
    assert "the shell has first" in lines and "[rank 0] second" in lines, lines


CONFIG = """
model: {{kind: mlp, hidden: [512, 512]}}
data: {{kind: synthetic-regression, samples: 4096, validation_fraction: 0.1}}
optimizer: {{kind: adam, learning_rate: 0.001}}
training: {{batch_size: 64, seed: 1, loss: mse, epochs: 6, max_grad_norm: 1.0}}
checkpoint: {{save_strategy: no}}
logging: {{logging_steps: 10{logging}}}
"""


def shown(screen, columns):
    """What is left on a terminal of so many columns, line by line, without colours."""
    lines, column = [[]], 0
    for part in re.findall(r"\x1b\[[\d;]*[A-Za-z]|[^\x1b]", screen):
        line = lines[-1]
        if part == "\n":
            lines.append([])
            column = 0
        elif part == "\r":
            column = 0
        elif part == "\x1b[K":
            del line[column:]
        elif not part.startswith("\x1b"):
            if column == columns:
                lines.append([])
                line, column = lines[-1], 0
            line[column:column + 1] = part
            column += 1
    return ["".join(line) for line in lines]


def written_config(folder, logging=""):
    config = pathlib.Path(folder) / "run.yaml"
    config.write_text(CONFIG.format(logging=logging))
    return config


def test_progress_is_one_line_that_fits_the_terminal(folder):
    config = written_config(folder)
    for columns in (80, 200):
        for ranks in (1, 2):
            screen = in_terminal(columns, LOCKSTEP, "train", config, "--nproc-per-node", ranks)
            lines = shown(screen, columns)
            progress = [line for line in lines if re.search(r"step \d+/\d+  ", line)]
            # Each evaluation stands in the place of the line before it; the last step's line stays.
            assert len(progress) == 1 and re.search(r"step (\d+)/\1  ", progress[0]), (progress, screen)
            assert " left" not in progress[0], progress
            assert len([line for line in lines if "evaluated after step" in line]) == 6, lines
            assert all(len(line) < columns for line in progress), progress
            assert "loss" in progress[0] and "samples/s" in progress[0], progress
            assert columns == 80 or "norm" in progress[0], progress
            # No line was wider than the terminal on the way, either.
            plain = re.sub(r"\x1b\[[\d;]*[A-Za-z]", "", screen)
            wide = [line for line in re.split("[\r\n]", plain) if "step" in line and len(line) > columns]
            assert not [line for line in wide if "/" in line and "loss" in line], wide


def test_piped_progress_is_a_line_every_so_many_steps(folder):
    done = run(LOCKSTEP, "train", written_config(folder), "--nproc-per-node", 2)
    done.expect(out=r"^\[rank 0\] epoch 6/6  step 174/174  100 %  loss [\d.e-]+  lr 0.001  norm [\d.e-]+  "
                    r"[\d,]+ samples/s")
    lines = [line for line in done.out.splitlines() if re.search(r"  step \d+/174  ", line)]
    steps = [int(re.search(r"step (\d+)/", line)[1]) for line in lines]
    assert steps == [*range(10, 171, 10), 174], steps
    assert "\x1b" not in done.out and "\r" not in done.out, done.out
    assert all(" left" in line for line in lines[:-1]) and " left" not in lines[-1], lines


if __name__ == "__main__":
    run_cases([
        test_ranks_are_told_how_wide_their_terminal_is,
        test_a_job_in_the_background_leaves_what_is_typed_to_the_shell,
        test_progress_is_one_line_that_fits_the_terminal,
        test_piped_progress_is_a_line_every_so_many_steps,
    ])
