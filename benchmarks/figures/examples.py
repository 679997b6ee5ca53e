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


def mnist_independent(bench, count):
    """Processes of one rank each, which know nothing of each other: samples/s of all."""
    steps = ["--steps", "50"] if bench.args.check else []
    with tempfile.TemporaryDirectory() as folder:
        files = [os.path.join(folder, str(i)) for i in range(count)]
        env = {k: v for k, v in os.environ.items() if k != "RANK"} | {"OMP_NUM_THREADS": str(bench.threads)}
        runs = [subprocess.Popen([bench.program("mnist"), "--json", f, *steps], env=env, stdout=subprocess.DEVNULL)
                for f in files]
        if any([r.wait(600) for r in runs]):
            sys.exit("an independent mnist failed")
        return sum(json.load(open(f))["samples_per_s"] for f in files)


def train_mnist(bench, ranks):
    few = ["--steps", "50"] if bench.args.check else []
    ours, alone, apart, tutorial, tuned = bench.alternating(
        lambda: mnist(bench, ranks), lambda: mnist(bench, 1), lambda: mnist_independent(bench, ranks),
        lambda: bench.peer("mnist_mlp.py", ranks, "--input", "loader", *few),
        lambda: bench.peer("mnist_mlp.py", ranks, "--input", "tensors", "--adam", "fused", *few))
    rate = lambda runs: [r["samples_per_s"] for r in runs]
    row = lambda name, mine, peer, bar=None: bench.row(f"MNIST, {ranks} ranks / {name}", mine, peer, "samples/s", bar,
                                                       lower_is_better=False)
    row("Python DDP, as tutorials write it", rate(ours), rate(tutorial), 6 if ranks == 2 else None)
    row("Python DDP, hand-optimised", rate(ours), rate(tuned), 4 if ranks == 2 else None)
    row("as many independent processes of ours", rate(ours), apart, {2: 0.95, 4: 0.9}.get(ranks))
    row("1 rank of ours", rate(ours), rate(alone))
    bench.row(f"MNIST step, {ranks} ranks / Python DDP, hand-optimised", [r["step_us"] / 1e3 for r in ours],
              [r["step_ms"] for r in tuned], "ms")
    bench.row(f"start of the job to the first step, {ranks} ranks", [r["startup_s"] for r in ours],
              [r["startup_s"] for r in tutorial], "s", 4 if ranks == 2 else None)
    bench.row(f"peak memory per rank, MNIST, {ranks} ranks", [max(r["peak_rss_mb"]) for r in ours],
              [max(r["peak_rss_mb"]) for r in tutorial], "MB", 2 if ranks == 2 else None)
    if ranks == 2:
        bench.row("MNIST test accuracy, points above Python's (+ 100)", [100 + 100 * r["accuracy"] for r in ours],
                  [100 + 100 * r["accuracy"] for r in tutorial], "%", lower_is_better=False)


def train_mnist_on_each_number(bench):
    for ranks in bench.rank_counts():
        train_mnist(bench, ranks)


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


FIGURES = {"mnist": train_mnist_on_each_number, "linear": linear_regression}
