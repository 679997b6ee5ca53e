#!/usr/bin/env python3
"""Measures what `lockstep plan` predicts: peak memory and step time of training, and which strategy is the fastest.

usage: plan_bars.py BUILD_DIR [--turns 5] [--only REGEX]

`lockstep bench` measures the machine. Then six models with two batch sizes each are trained on 2 ranks by AdamW with
every strategy, and each model on one rank, too; the transformers also with activations recomputed. Three models are
trained with each hook, and with evaluations of large batches, where memory alone is measured. That makes 72
configurations. The plan is given the machine's file and the time of a forward and backward pass on one rank without
communication; everything else is predicted. That pass and all strategies of a model are timed by turns in the same
processes. The advised strategy is compared with each other one turn by turn; where one seems to be more than 5 %
faster, in three times as many turns. Memory is measured in a process for each, while malloc returns what is freed.
Prints a table and a summary, and writes build/bench/plan.json.
"""
import argparse
import json
import os
import re
import statistics
import subprocess
import sys

MODELS = {
    "mlp-small": (64, 512),
    "mlp-large": (32, 256),
    "convnet": (32, 128),
    "resnet18": (8, 32),
    "gpt-small": (4, 16),
    "gpt-large": (2, 8),
}
HOOKS = ("bf16", "power_sgd", "top_k")
EVALUATED = {"mlp-large": 4096, "convnet": 512, "gpt-small": 64}  # samples of an evaluation's batch
STRATEGIES = ("ddp", "zero", "fsdp-gradients", "fsdp")
AS_FAST = 1.05  # of the fastest strategy's time


# glibc's malloc gives larger blocks back at once, so that a process has what it needs and no more.
RETURNED = {"MALLOC_MMAP_THRESHOLD_": "131072"}


def measure(build, machine, ranks, model, batch, *options, env=None):
    command = [os.path.join(build, "bin", "lockstep"), "run", "--nproc-per-node", str(ranks)]
    command += [os.path.join(build, "bin", "bench_plan_bars"), "--machine", machine, "--model", model]
    command += ["--batch", str(batch), *options]
    environment = os.environ | {"OMP_NUM_THREADS": "1"} | (env or {})
    ran = subprocess.run(command, capture_output=True, text=True, env=environment)
    found = re.search(r"\{.*\}", ran.stdout)
    if ran.returncode or not found:
        sys.exit(f"{' '.join(command)}: {ran.stdout}{ran.stderr}")
    return json.loads(found[0])


def off(pair):
    return pair["plan"] / pair["measured"] - 1


def show(row):
    name = f"{row['model']} {row['batch']}, {row['ranks']} x {row['strategy']}{', twice' * row['recompute']}"
    peak, step = row["peak"], row.get("step")
    text = f"{name:42} {peak['measured'] / 2**20:8.0f} {peak['plan'] / 2**20:8.0f} {off(peak):+7.1%}"
    if step:
        estimate = step["estimated"] / step["measured"] - 1
        text += f" {step['measured'] * 1e3:9.2f} {step['plan'] * 1e3:9.2f} {off(step):+7.1%} {estimate:+9.0%}"
    print(text, flush=True)


def summary(name, errors, bar):
    errors = sorted(abs(e) for e in errors)
    if errors:
        within = sum(e <= bar for e in errors)
        mean = sum(errors) / len(errors)
        median = errors[len(errors) // 2]
        print(f"{name}: {within} of {len(errors)} within {bar:.0%};"
              f" mean {mean:.1%}, median {median:.1%}, largest {errors[-1]:.1%}")


def slower_than(advice, timed):
    """How many times as long as each other strategy's a step of the advised one takes: the median over turns of the
    two's ratio in one turn, which what disturbs the machine for longer than that leaves as it is."""
    steps = timed["steps"]
    return {
        strategy: statistics.median(a / b for a, b in zip(steps[advice]["turns"], step["turns"]))
        for strategy, step in steps.items()
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("build")
    parser.add_argument("--turns", type=int, default=5, help="of which medians are taken (5)")
    parser.add_argument("--only", default="", help="regular expression on the model's name")
    args = parser.parse_args()
    folder = os.path.join(os.path.dirname(os.path.abspath(args.build)), "bench")
    os.makedirs(folder, exist_ok=True)
    machines = {}
    for ranks in (1, 2):
        machines[ranks] = os.path.join(folder, f"machine{ranks}.json")
        command = [os.path.join(args.build, "bin", "lockstep"), "bench", "--nproc-per-node", str(ranks)]
        command += ["--to", machines[ranks]]
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL, env=environment)
    print(f"{os.cpu_count()} cores, load before: {os.getloadavg()[0]:.2f}")
    print(f"{'':42} {'peak MiB':>8} {'plan':>8} {'off':>7}"
          f" {'step ms':>9} {'plan':>9} {'off':>7} {'estimate':>9}")
    rows, advised = [], []

    def time(ranks, model, batch, strategies, turns, *options):
        named = ("--strategies", ",".join(strategies), "--turns", str(turns))
        return measure(args.build, machines[ranks], ranks, model, batch, *options, *named)

    def run(ranks, model, batch, strategies, recompute=False):
        """Times by strategy."""
        here = (args.build, machines[ranks], ranks, model, batch)
        twice = ["--recompute"] * recompute
        timed = time(ranks, model, batch, strategies, args.turns, *twice)
        row = dict(model=model, batch=batch, ranks=ranks, recompute=recompute)
        for strategy, step in timed["steps"].items():
            peak = measure(*here, *twice, "--strategies", strategy, env=RETURNED)
            rows.append(row | dict(strategy=strategy, peak=peak, step=step))
            show(rows[-1])
        return timed

    models = {model: batches for model, batches in MODELS.items() if re.search(args.only, model)}
    for model, batches in models.items():
        for batch in batches:
            timed = run(2, model, batch, STRATEGIES)
            ratios = slower_than(timed["advice"], timed)
            if max(ratios.values()) > AS_FAST:
                ratios = slower_than(timed["advice"], time(2, model, batch, STRATEGIES, 3 * args.turns))
            fastest = max(ratios, key=ratios.get)
            advised.append((f"{model} {batch}", timed["advice"], ratios[fastest], fastest))
    for model in models:
        run(1, model, MODELS[model][1], ["ddp"])
        if model.startswith("gpt"):
            run(1, model, MODELS[model][1], ["ddp"], recompute=True)
            run(2, model, MODELS[model][1], ["ddp", "fsdp"], recompute=True)
    for model in models:
        if model not in EVALUATED:
            continue
        batch, evaluated = MODELS[model][0], EVALUATED[model]
        options = [(hook, ["--hook", hook]) for hook in HOOKS]
        for name, flags in [*options, (f"evaluates {evaluated}", ["--evaluate", str(evaluated)])]:
            peak = measure(args.build, machines[2], 2, model, batch, *flags, env=RETURNED)
            row = dict(model=model, batch=batch, ranks=2, recompute=False, strategy=f"ddp, {name}", peak=peak)
            rows.append(row)
            show(row)
    print()
    timed = [row for row in rows if "step" in row]
    summary("peak memory, hooks and evaluations", [off(r["peak"]) for r in rows if "step" not in r], .05)
    kept = [row for row in timed if not row["recompute"]]
    recomputed = [row for row in timed if row["recompute"]]
    for name, chosen in (("nothing recomputed", kept), ("blocks recomputed", recomputed)):
        summary(f"peak memory, {name}", [off(r["peak"]) for r in chosen], .05)
        summary(f"step time, {name}", [off(r["step"]) for r in chosen], .10)
    for name, advice, factor, fastest in advised:
        if factor > AS_FAST:
            print(f"advice for {name}: {advice}, and {fastest} is {factor - 1:.0%} faster")
    right = sum(factor <= AS_FAST for *_, factor, _ in advised)
    print(f"advice: {right} of {len(advised)} the fastest or within {AS_FAST - 1:.0%} of it")
    with open(os.path.join(folder, "plan.json"), "w") as file:
        json.dump(rows, file, indent=1)


if __name__ == "__main__":
    main()
