"""Trainings that are killed at random moments and started again end with the bits of those that were not.

python3 resume_test.py SOURCE_DIR BUILD_DIR [--kills 12] [--steps 60] [--seed 1] [--plan "WORLD FEATURE..."]

Each round draws a plan: so many ranks, and which features the training has (resume/trainer.cpp). It runs once undisturbed, and once with
SIGKILL to a rank or to the whole job at random moments. Both leave a last checkpoint, and a line for each step with the loss's bits.
"""
import argparse
import json
import os
import pathlib
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time

from support.program import LAUNCHED, LIMIT_S

OPTIMIZERS = ["adam", "adamw", "sgd", "fused_adam", "fused_sgd", "rmsprop", "adagrad"]
HOOKS = ["", "power_sgd", "top_k", "cast", "local_sgd averager"]
CHOICES = ["dropout", "batch_norm", "sync_batch_norm", "accumulate", "prefetch", "transforms", "drop_last", "zero", "scaler", "overflow",
           "clip", "cosine", "plateau", "averager", "global_mean", "async", "shared", "sparse"]


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
    return dice.choice([1, 2, 2, 4]), sorted(words | {dice.choice(["shm", "gloo"])})


class Run:
    def __init__(self, binaries, folder, world, words, steps, seed, every):
        self.binaries, self.folder, self.world = binaries, pathlib.Path(folder), world
        self.arguments = [self.folder / "runs", self.folder / "trace", steps, every, seed, *words]
        self.folder.mkdir()

    def start(self, *flags):
        environment = {name: value for name, value in os.environ.items() if not LAUNCHED.match(name)} | {"OMP_NUM_THREADS": "1"}
        if "gloo" in self.arguments and self.world > 1:
            environment |= {"LOCKSTEP_BACKEND": "gloo"}
        self.log = open(self.folder / "log", "ab")
        command = [self.binaries / "lockstep", "run", "--nproc-per-node", self.world, *flags, self.binaries / "resume_trainer", *self.arguments]
        return subprocess.Popen([str(word) for word in command], env=environment, stdin=subprocess.DEVNULL, stdout=self.log, stderr=self.log)

    def lines(self):
        trace = self.folder / "trace.0"
        return trace.read_bytes().count(b"\n") if trace.exists() else 0

    def finish(self, job):
        status = job.wait(LIMIT_S)
        assert status == 0, f"exit status {status}:\n{(self.folder / 'log').read_text()[-4000:]}"

    def trace(self):
        """The loss of each step on each rank; a step that was made again gave the same."""
        found = {}
        for rank in range(self.world):
            for line in (self.folder / f"trace.{rank}").read_text().splitlines():
                step, loss = line.split()
                was = found.setdefault((rank, int(step)), loss)
                assert was == loss, f"rank {rank}, step {step}: the loss was {was} and is {loss} after a restart"
        return found

    def state(self):
        name = (self.folder / "runs/latest").read_text().split()[0]
        manifest = json.loads((self.folder / "runs" / name / "manifest.json").read_text())
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


def disturb(run, dice, kills, steps):
    """Kills a training so many times, and lets it end; returns how often it was killed."""
    done = 0
    restarting = dice.random() < 0.5  # by the launcher itself
    while done < kills:
        job = run.start(*(["--max-restarts", "1000"] if restarting else []))
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
                os.kill(dice.choice(list(ranks.values())) if restarting or dice.random() < 0.5 else job.pid, signal.SIGKILL)
                done += 1
            except ProcessLookupError:
                continue
            if not restarting:
                job.wait(LIMIT_S)
        if job.poll() is None and restarting:
            return run.finish(job) or done
        job.wait(LIMIT_S)
        if job.returncode == 0:
            return done  # it was faster
    run.finish(run.start())
    return done


def same(one, other):
    for (what, left), right in zip((("last step", one[0]), ("tensors", one[1]), ("values", one[2])), other):
        if left == right:
            continue
        if isinstance(left, dict):
            what = f"{what} {sorted(name for name in left.keys() | right.keys() if left.get(name) != right.get(name))}"
        raise AssertionError(f"{what} differ")


def round_of(binaries, folder, world, words, dice, kills, steps):
    seed, every = dice.randrange(1000), dice.randrange(1, 12)
    plain = Run(binaries, folder / "plain", world, words, steps, seed, every)
    plain.finish(plain.start())
    killed = Run(binaries, folder / "killed", world, words, steps, seed, every)
    done = disturb(killed, dice, kills, steps)
    expected, found = plain.trace(), killed.trace()
    assert expected.keys() == found.keys(), "not every step was made"
    wrong = sorted((step, rank) for rank, step in expected if expected[rank, step] != found[rank, step])
    assert not wrong, f"the loss of (step, rank) {wrong[0]} differs"
    same(plain.state(), killed.state())
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
            kills += max(1, round_of(args.build.resolve() / "bin", folder, world, words, dice, min(4, args.kills - kills), args.steps))
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
