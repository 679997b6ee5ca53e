#!/usr/bin/env python3
"""Lockstep beside PyTorch's own DDP, in one run: medians over alternating repeats, as ratios.

usage: run.py BUILD_DIR [--python PATH] [--repeats 5] [--only REGEX] [--check]

Prints a table and writes build/bench/results.json beside BUILD_DIR: a list of {name, ours, peer, unit, ratio, bar, met, machine}.
A ratio says how many times better ours is, except where the bar is an upper one (<=). --check runs everything once on a
little work, to see that it runs; its figures mean nothing.
"""
import argparse
import json
import os
import platform
import re
import statistics
import subprocess
import sys
import tempfile

HERE = os.path.dirname(os.path.abspath(__file__))


class Bench:
    def __init__(self, args):
        self.args, self.build, self.rows = args, os.path.abspath(args.build), []
        self.repeats = 1 if args.check else args.repeats

    # Running things. Each returns the program's own figures.

    def run(self, command, enough=lambda output: False, **environment):
        """Standard output of a command that succeeds, or whose output is `enough` whatever came after it."""
        env = {k: v for k, v in os.environ.items() if k != "OMP_NUM_THREADS"} | environment
        done = subprocess.run(command, capture_output=True, text=True, env=env, timeout=600)
        if done.returncode != 0:
            said = f"{' '.join(command)} ended with {done.returncode}:\n{done.stdout[-2000:]}{done.stderr[-4000:]}"
            if not enough(done.stdout):
                sys.exit(said)
            cause = next((line for line in done.stderr.splitlines() if "terminate" in line or "Error" in line), "")
            print(f"note: a Python peer reported and then ended with {done.returncode}: {cause}", file=sys.stderr)
        return done.stdout

    def program(self, name):
        return os.path.join(self.build, "bin", name)

    def launched(self, ranks, *command):
        """Standard output of our ranks, without the rank tags."""
        out = self.run([self.program("lockstep"), "run", "--nproc-per-node", str(ranks), *command])
        return re.sub(r"^\[rank \d+\] ", "", out, flags=re.M)

    def peer(self, script, ranks, *flags):
        """The JSON line of a Python peer; under torchrun when it has more than one rank.

        libtorch's own threads now and then abort a Python rank as it exits ("terminate called without an active exception"),
        after the line was printed: the figures stand.
        """
        python = [self.args.python]
        if ranks > 1:
            python += ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
        else:
            flags = ("--world", "1", *flags)
        lines = lambda out: [line for line in out.splitlines() if line.startswith("{")]
        out = self.run([*python, os.path.join(HERE, "peers", script), *flags], enough=lines, GLOO_SOCKET_IFNAME="lo")
        return json.loads(lines(out)[-1])

    def mnist(self, ranks):
        steps = ["--steps", "50"] if self.args.check else []
        with tempfile.NamedTemporaryFile(mode="r") as file:
            self.launched(ranks, self.program("mnist"), "--json", file.name, *steps)
            return json.loads(file.read())

    def mnist_independent(self):
        """Two processes of one rank each, which know nothing of each other: samples/s of both."""
        steps = ["--steps", "50"] if self.args.check else []
        with tempfile.TemporaryDirectory() as folder:
            files = [os.path.join(folder, str(i)) for i in range(2)]
            env = {k: v for k, v in os.environ.items() if k != "RANK"} | {"OMP_NUM_THREADS": "1"}
            runs = [subprocess.Popen([self.program("mnist"), "--json", f, *steps], env=env, stdout=subprocess.DEVNULL)
                    for f in files]
            if any(r.wait(600) for r in runs):
                sys.exit("an independent mnist failed")
            return sum(json.load(open(f))["samples_per_s"] for f in files)

    # Figures.

    def alternating(self, *measures):
        """Lists of results, one per measure; the measures take turns, so that a disturbance meets all."""
        results = [[] for _ in measures]
        for _ in range(self.repeats):
            for measure, into in zip(measures, results):
                into.append(measure())
        return results

    def row(self, name, ours, peer, unit, bar=None, upper=False, lower_is_better=True):
        """One line. `ours` and `peer` are lists of repeats; an upper bar bounds ours / peer from above."""
        a, b = statistics.median(ours), statistics.median(peer)
        ratio = a / b if upper or not lower_is_better else b / a
        met = None if bar is None else ratio <= bar if upper else ratio >= bar
        sign = "<=" if upper else ">="
        self.rows.append(dict(name=name, ours=round(a, 4), peer=round(b, 4), unit=unit, ratio=round(ratio, 3),
                              bar=None if bar is None else f"{sign} {bar}", met=met, spread=dict(ours=ours, peer=peer)))
        shown = {True: "met", False: "NOT MET", None: ""}[met]
        print(f"{name:58} {a:12.5g} {b:12.5g} {unit:10} {ratio:8.2f} {self.rows[-1]['bar'] or '':>8} {shown}", flush=True)

    # The work.

    def all_reduce(self, ranks):
        def ours():
            line = json.loads(self.launched(ranks, self.program("bench_all_reduce")))
            return {r["bytes"]: r for r in line["rows"]}

        def gloo():
            limit = ["--max-bytes", "65536"] if self.args.check else ["--max-bytes", str(25 << 20)]
            line = self.peer("allreduce.py", ranks, "--ops", "all_reduce", *limit)
            return {r["bytes"]: r["latency_us"][1] for r in line["rows"]}

        mine, theirs = self.alternating(ours, gloo)
        # 16 MiB is not among ours, 25 MiB is.
        bars = {2: {25 << 20: (12, 3), 64 << 10: (20, None)}, 4: {25 << 20: (8, None), 64 << 10: (8, None)}}[ranks]
        for size in [s for s in mine[0] if s in theirs[0]]:
            gloo_us = [t[size] for t in theirs]
            text = f"{size >> 20} MiB" if size >= 1 << 20 else f"{size >> 10} KiB" if size >= 1 << 10 else f"{size} B"
            place, private = bars.get(size, (None, None))
            self.row(f"all_reduce {text}, {ranks} ranks, group memory / Gloo", [m[size]["in_place_us"] for m in mine],
                     gloo_us, "us", place)
            self.row(f"all_reduce {text}, {ranks} ranks, private tensors / Gloo", [m[size]["private_us"] for m in mine],
                     gloo_us, "us", private)
        if ranks == 2:
            size = 25 << 20
            self.row("all_reduce 25 MiB, 2 ranks / read-add-write of the bytes", [m[size]["in_place_us"] for m in mine],
                     [m[size]["read_add_write_us"] for m in mine], "us", 1.3, upper=True)

    def train_mnist(self):
        few = ["--steps", "50"] if self.args.check else []
        ours, alone, apart, tutorial, tuned = self.alternating(
            lambda: self.mnist(2), lambda: self.mnist(1), self.mnist_independent,
            lambda: self.peer("mnist_mlp.py", 2, "--input", "loader", *few),
            lambda: self.peer("mnist_mlp.py", 2, "--input", "tensors", "--adam", "fused", *few))
        rate = lambda runs: [r["samples_per_s"] for r in runs]
        self.row("MNIST, 2 ranks / Python DDP, as tutorials write it", rate(ours), rate(tutorial), "samples/s", 6,
                 lower_is_better=False)
        self.row("MNIST, 2 ranks / Python DDP, hand-optimised", rate(ours), rate(tuned), "samples/s", 4,
                 lower_is_better=False)
        self.row("MNIST, 2 ranks / two independent processes of ours", rate(ours), apart, "samples/s", 0.96,
                 lower_is_better=False)
        self.row("MNIST, 2 ranks / 1 rank of ours", rate(ours), rate(alone), "samples/s", lower_is_better=False)
        self.row("MNIST step, 2 ranks / Python DDP, hand-optimised", [r["step_us"] / 1e3 for r in ours],
                 [r["step_ms"] for r in tuned], "ms")
        self.row("start of the job to the first step, 2 ranks", [r["startup_s"] for r in ours],
                 [r["startup_s"] for r in tutorial], "s", 4)
        self.row("peak memory per rank, MNIST, 2 ranks", [max(r["peak_rss_mb"]) for r in ours],
                 [max(r["peak_rss_mb"]) for r in tutorial], "MB", 2)
        self.row("MNIST test accuracy, points above Python's (+ 100)", [100 + 100 * r["accuracy"] for r in ours],
                 [100 + 100 * r["accuracy"] for r in tutorial], "%", lower_is_better=False)

    def linear_regression(self):
        epochs = ["--epochs", "1"] if self.args.check else []

        def ours():
            text = self.launched(2, self.program("linear_regression"), *epochs)
            return float(re.search(r": ([\d.]+) s, loss", text)[1])

        mine, written, tensors = self.alternating(
            ours, lambda: self.peer("linear_regression.py", 2, "--input", "loader", *epochs)["train_s"],
            lambda: self.peer("linear_regression.py", 2, "--input", "tensors", *epochs)["train_s"])
        self.row("linear regression, 2 ranks / Python DDP", mine, written, "s", 10)
        self.row("linear regression, 2 ranks / Python DDP, hand-optimised", mine, tensors, "s")


def machine():
    with open("/proc/cpuinfo") as file:
        model = next((line.split(":")[1].strip() for line in file if line.startswith("model name")), platform.machine())
    return f"{model}, {len(os.sched_getaffinity(0))} cores, {platform.system()} {platform.release()}"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("build")
    parser.add_argument("--python", default=os.path.join(HERE, "..", ".deps", "peers", "bin", "python"))
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--only", default="", help="regular expression on all_reduce-2, all_reduce-4, mnist, linear")
    parser.add_argument("--check", action="store_true")
    args = parser.parse_args()
    if not os.path.exists(args.python):
        sys.exit(f"no Python with torch at {args.python}: run `make bench-setup`")
    bench = Bench(args)
    print(f"{machine()}; medians of {bench.repeats}; load before: {os.getloadavg()[0]:.2f}")
    print(f"{'':58} {'ours':>12} {'peer':>12} {'unit':10} {'ratio':>8} {'bar':>8}")
    for name, work in {"mnist": bench.train_mnist, "linear": bench.linear_regression,
                       "all_reduce-2": lambda: bench.all_reduce(2), "all_reduce-4": lambda: bench.all_reduce(4)}.items():
        if re.search(args.only, name):
            work()
    for row in bench.rows:
        row["machine"] = machine()
    folder = os.path.join(os.path.dirname(bench.build), "bench")
    os.makedirs(folder, exist_ok=True)
    with open(os.path.join(folder, "results.json"), "w") as file:
        json.dump(bench.rows, file, indent=1)
    print(f"wrote {os.path.join(folder, 'results.json')}")


if __name__ == "__main__":
    main()
