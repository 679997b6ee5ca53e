"""Trainings that are killed at random moments and started again end with the bits of those that were not.

python3 resume_test.py SOURCE_DIR BUILD_DIR [--kills 12] [--steps 60] [--seed 1] [--plan "WORLD FEATURE..."]

Each round draws a plan: the number of ranks, and which features the training has (resume/trainer.cpp). The training
runs once undisturbed, and once with SIGKILL to a rank or to the whole job at random moments. Both leave a last
checkpoint, and a line for each step with the loss's bits. With lanes each start may have another number of ranks, and
the bits are those of the undisturbed run.
"""
import argparse
import json
import os
import pathlib
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time

from support.program import LAUNCHED, LIMIT_S

OPTIMIZERS = ["adam", "adamw", "sgd", "fused_adam", "fused_sgd", "rmsprop", "adagrad"]
HOOKS = ["", "power_sgd", "top_k", "cast", "local_sgd averager"]
CHOICES = ["dropout", "batch_norm", "sync_batch_norm", "accumulate", "prefetch", "transforms", "drop_last", "zero",
           "scaler", "overflow", "clip", "cosine", "plateau", "averager", "global_mean", "async", "shared", "sparse",
           "lanes"]
RANKS_WITH_LANES = [1, 2, 3, 4]


def drawn(dice):
    """Ranks and features that go together."""
    words = {dice.choice(OPTIMIZERS), *dice.choice(HOOKS).split(), *(one for one in CHOICES if dice.random() < 0.4)}
    if "overflow" in words:
        words.add("scaler")
    if "local_sgd" in words:
        words -= {"zero", "shared", "sync_batch_norm", "scaler", "overflow", "sparse", "batch_norm", "dropout"}
    if "zero" in words:
        words -= {"sparse"}
    if "adagrad" not in words:
        words -= {"sparse"}  # the others have no sparse step
    if "lanes" in words:
        words -= {*" ".join(HOOKS).split(), "averager", "accumulate", "sync_batch_norm", "shared"}
    return dice.choice([1, 2, 2, 4]), sorted(words | {dice.choice(["shm", "gloo"])})


class Run:
    def __init__(self, binaries, folder, world, words, steps, seed, every):
        self.binaries, self.folder, self.world = binaries, pathlib.Path(folder), world
        self.has_lanes = "lanes" in words
        self.fewest = world  # ranks that any start had
        self.arguments = [self.folder / "runs", self.folder / "trace", steps, every, seed, *words]
        self.folder.mkdir()

    def start(self, *flags, world=None):
        self.world = world or self.world
        self.fewest = min(self.fewest, self.world)
        environment = {name: value for name, value in os.environ.items() if not LAUNCHED.match(name)}
        environment |= {"OMP_NUM_THREADS": "1"}
        if "gloo" in self.arguments and self.world > 1:
            environment |= {"LOCKSTEP_BACKEND": "gloo"}
        self.log = open(self.folder / "log", "ab")
        command = [self.binaries / "lockstep", "run", "--nproc-per-node", self.world, *flags]
        command += [self.binaries / "resume_trainer", *self.arguments]
        return subprocess.Popen([str(word) for word in command], env=environment, stdin=subprocess.DEVNULL,
                                stdout=self.log, stderr=self.log)

    def lines(self):
        trace = self.folder / "trace.0"
        return trace.read_bytes().count(b"\n") if trace.exists() else 0

    def finish(self, job):
        status = job.wait(LIMIT_S)
        assert status == 0, f"exit status {status}:\n{(self.folder / 'log').read_text()[-4000:]}"

    def trace(self):
        """The loss of each step on each rank, with lanes on all; a step that was made again gave the same."""
        found = {}
        for trace in self.folder.glob("trace.*"):
            rank = 0 if self.has_lanes else int(trace.suffix[1:])
            for line in trace.read_text().splitlines():
                step, loss = line.split()
                was = found.setdefault((rank, int(step)), loss)
                assert was == loss, f"rank {rank}, step {step}: the loss was {was} and is {loss} after a restart"
        return found

    def last(self):
        return self.folder / "runs" / (self.folder / "runs/latest").read_text().split()[0]

    def state(self):
        manifest = json.loads((self.last() / "manifest.json").read_text())
        tensors = {name: [(box["offset"], box["size"], box["xxh3"]) for box in tensor["boxes"]]
                   for name, tensor in manifest["tensors"].items()}
        return manifest["step"], tensors, manifest["values"]


def ranks_of(job):
    """The processes of the ranks by rank, as far as they have started."""
    found = {}
    try:
        for pid in pathlib.Path(f"/proc/{job.pid}/task/{job.pid}/children").read_text().split():
            for word in pathlib.Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
                if word.startswith(b"RANK="):
                    found[int(word[5:])] = int(pid)
    except OSError:
        pass  # it has ended
    return found


def lives(pid):
    """Whether a thread of the process has not ended: a first thread that has may be followed by others."""
    try:
        state = pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        return state not in "ZX" or len(os.listdir(f"/proc/{pid}/task")) > 1
    except OSError:
        return False


def wait_for_the_end_of(ranks):
    """A killed rank holds the directory's lock until it has ended, and a killed launcher does not wait for that."""
    deadline = time.monotonic() + LIMIT_S
    while any(lives(pid) for pid in ranks):
        assert time.monotonic() < deadline, f"ranks of a killed launcher go on: {ranks}"
        time.sleep(0.002)


def disturb(run, dice, kills, steps):
    """Kills a training so many times, and lets it end; returns how often it was killed."""
    done = 0
    restarting = not run.has_lanes and dice.random() < 0.5  # by the launcher itself
    while done < kills:
        job = run.start(*(["--max-restarts", "1000"] if restarting else []),
                        world=dice.choice(RANKS_WITH_LANES) if run.has_lanes else None)
        while done < kills and job.poll() is None:
            until, deadline = run.lines() + dice.randrange(0, steps // 2), time.monotonic() + LIMIT_S
            while job.poll() is None and run.lines() < until:
                assert time.monotonic() < deadline, (run.folder / "log").read_text()[-4000:]
                time.sleep(0.002)
            time.sleep(dice.random() * 0.02)
            ranks = ranks_of(job)
            if not ranks or job.poll() is not None:
                continue
            try:
                one_rank = restarting or dice.random() < 0.5
                os.kill(dice.choice(list(ranks.values())) if one_rank else job.pid, signal.SIGKILL)
                done += 1
            except ProcessLookupError:
                continue
            if not restarting:
                job.wait(LIMIT_S)
                wait_for_the_end_of(ranks.values())
        if job.poll() is None and restarting:
            return run.finish(job) or done
        job.wait(LIMIT_S)
        if job.returncode == 0:
            return done  # it was faster
    run.finish(run.start(world=dice.choice(RANKS_WITH_LANES) if run.has_lanes else None))
    return done


def same(one, other):
    for (what, left), right in zip((("last step", one[0]), ("tensors", one[1]), ("values", one[2])), other):
        if left == right:
            continue
        if isinstance(left, dict):
            what = f"{what} {sorted(name for name in left.keys() | right.keys() if left.get(name) != right.get(name))}"
        raise AssertionError(f"{what} differ")


def verify(binaries, run):
    verified = subprocess.run([binaries / "lockstep", "verify", run.folder / "runs"], capture_output=True, text=True)
    assert verified.returncode == 0, (verified.stdout + verified.stderr)[-2000:]


def round_of(binaries, folder, world, words, dice, kills, steps):
    seed, every = dice.randrange(1000), dice.randrange(1, 12)
    plain = Run(binaries, folder / "plain", world, words, steps, seed, every)
    plain.finish(plain.start())
    killed = Run(binaries, folder / "killed", world, words, steps, seed, every)
    done = disturb(killed, dice, kills, steps)
    for run in (plain, killed):
        verify(binaries, run)
    expected, found = plain.trace(), killed.trace()
    assert expected.keys() == found.keys(), "not every step was made"
    wrong = sorted((step, rank) for rank, step in expected if expected[rank, step] != found[rank, step])
    assert not wrong, f"the loss of (step, rank) {wrong[0]} differs"
    if not plain.has_lanes:
        same(plain.state(), killed.state())
        return done
    # The parts of a tensor depend on the number of ranks, so the tensors are compared. A rank that did not take part
    # in every start began with another generator's state.
    diff = subprocess.run([binaries / "lockstep", "diff", plain.last(), killed.last()], capture_output=True, text=True)
    *lines, summary = diff.stdout.splitlines() or [""]
    always = min(plain.fewest, killed.fewest)
    generators = (re.match(r"generators/cpu/rank-(\d+): ", line) for line in lines)
    differing = [line for line, rank in zip(lines, generators) if line and not (rank and int(rank[1]) >= always)]
    assert re.match(r"\d+ tensors are the same", summary) and not differing, (diff.stdout + diff.stderr)[-2000:]
    return done


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source")
    parser.add_argument("build", type=pathlib.Path)
    parser.add_argument("--kills", type=int, default=12)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--plan", help="ranks and features, in place of drawn ones")
    args = parser.parse_args()
    dice, kills, failed, rounds = random.Random(args.seed), 0, 0, 0
    while kills < args.kills:
        world, words = drawn(dice)
        if args.plan:
            world, words = int(args.plan.split()[0]), args.plan.split()[1:]
        folder = pathlib.Path(tempfile.mkdtemp(prefix="lockstep-resume-"))
        rounds += 1
        try:
            most = min(4, args.kills - kills)
            kills += max(1, round_of(args.build.resolve() / "bin", folder, world, words, dice, most, args.steps))
        except AssertionError as wrong:
            failed += 1
            kills += 4
            print(f"FAILED --plan '{world} {' '.join(words)}': {wrong}", flush=True)
        finally:
            shutil.rmtree(folder)
    print(f"{rounds} trainings, killed {kills} times: {failed} failed")
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
