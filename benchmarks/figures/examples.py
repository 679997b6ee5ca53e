"""The examples beside the same training in Python."""
import json
import os
import re
import subprocess
import sys
import tempfile


def mnist(bench, ranks):
    steps = ["--steps", "50"] if bench.args.check else []
    with tempfile.NamedTemporaryFile(mode="r") as file:
        bench.launched(ranks, bench.program("mnist"), "--json", file.name, *steps)
        return json.loads(file.read())


def mnist_independent(bench):
    """Two processes of one rank each, which know nothing of each other: samples/s of both."""
    steps = ["--steps", "50"] if bench.args.check else []
    with tempfile.TemporaryDirectory() as folder:
        files = [os.path.join(folder, str(i)) for i in range(2)]
        env = {k: v for k, v in os.environ.items() if k != "RANK"} | {"OMP_NUM_THREADS": "1"}
        runs = [subprocess.Popen([bench.program("mnist"), "--json", f, *steps], env=env, stdout=subprocess.DEVNULL)
                for f in files]
        if any(r.wait(600) for r in runs):
            sys.exit("an independent mnist failed")
        return sum(json.load(open(f))["samples_per_s"] for f in files)


def train_mnist(bench):
    few = ["--steps", "50"] if bench.args.check else []
    ours, alone, apart, tutorial, tuned = bench.alternating(
        lambda: mnist(bench, 2), lambda: mnist(bench, 1), lambda: mnist_independent(bench),
        lambda: bench.peer("mnist_mlp.py", 2, "--input", "loader", *few),
        lambda: bench.peer("mnist_mlp.py", 2, "--input", "tensors", "--adam", "fused", *few))
    rate = lambda runs: [r["samples_per_s"] for r in runs]
    bench.row("MNIST, 2 ranks / Python DDP, as tutorials write it", rate(ours), rate(tutorial), "samples/s", 6,
              lower_is_better=False)
    bench.row("MNIST, 2 ranks / Python DDP, hand-optimised", rate(ours), rate(tuned), "samples/s", 4,
              lower_is_better=False)
    bench.row("MNIST, 2 ranks / two independent processes of ours", rate(ours), apart, "samples/s", 0.96,
              lower_is_better=False)
    bench.row("MNIST, 2 ranks / 1 rank of ours", rate(ours), rate(alone), "samples/s", lower_is_better=False)
    bench.row("MNIST step, 2 ranks / Python DDP, hand-optimised", [r["step_us"] / 1e3 for r in ours],
              [r["step_ms"] for r in tuned], "ms")
    bench.row("start of the job to the first step, 2 ranks", [r["startup_s"] for r in ours],
              [r["startup_s"] for r in tutorial], "s", 4)
    bench.row("peak memory per rank, MNIST, 2 ranks", [max(r["peak_rss_mb"]) for r in ours],
              [max(r["peak_rss_mb"]) for r in tutorial], "MB", 2)
    bench.row("MNIST test accuracy, points above Python's (+ 100)", [100 + 100 * r["accuracy"] for r in ours],
              [100 + 100 * r["accuracy"] for r in tutorial], "%", lower_is_better=False)


def linear_regression(bench):
    epochs = ["--epochs", "1"] if bench.args.check else []

    def ours():
        text = bench.launched(2, bench.program("linear_regression"), *epochs)
        return float(re.search(r": ([\d.]+) s, loss", text)[1])

    mine, written, tensors = bench.alternating(
        ours, lambda: bench.peer("linear_regression.py", 2, "--input", "loader", *epochs)["train_s"],
        lambda: bench.peer("linear_regression.py", 2, "--input", "tensors", *epochs)["train_s"])
    bench.row("linear regression, 2 ranks / Python DDP", mine, written, "s", 10)
    bench.row("linear regression, 2 ranks / Python DDP, hand-optimised", mine, tensors, "s")


FIGURES = {"mnist": train_mnist, "linear": linear_regression}
