#!/usr/bin/env python3
"""Lockstep beside PyTorch's own DDP, in one run: medians over alternating repeats, as ratios.

usage: run.py BUILD_DIR [--python PATH] [--repeats 5] [--threads 1] [--only REGEX] [--check]

Prints a table and writes build/bench/results.json beside BUILD_DIR: a list of
{name, ours, peer, unit, ratio, bar, met, machine, threads}.
A ratio says how many times better ours is, except where the bar is an upper one (<=). --check runs everything once on a
little work, to see that it runs; its figures mean nothing.
"""
import argparse
import json
import os
import re
import sys

from bench import HERE, Bench, machine
from figures import checkpoints, collectives, examples, language_models, launching, training

FIGURES = (examples.FIGURES | training.FIGURES | language_models.FIGURES
           | launching.FIGURES | collectives.FIGURES | checkpoints.FIGURES)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("build")
    parser.add_argument("--python", default=os.path.join(HERE, "..", ".deps", "peers", "bin", "python"))
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1, help="of each rank, ours and theirs (1)")
    parser.add_argument("--only", default="", help=f"regular expression on {', '.join(FIGURES)}")
    parser.add_argument("--check", action="store_true")
    args = parser.parse_args()
    if not os.path.exists(args.python):
        sys.exit(f"no Python with torch at {args.python}: run `make bench-setup`")
    bench = Bench(args)
    print(f"{machine()}; medians of {bench.repeats}; each rank computes with {bench.threads} "
          f"thread{'s' * (bench.threads > 1)}, on both sides; load before: {os.getloadavg()[0]:.2f}")
    print(f"{'':58} {'ours':>12} {'peer':>12} {'unit':10} {'ratio':>8} {'bar':>8}")
    for name, measure in FIGURES.items():
        if re.search(args.only, name):
            measure(bench)
    for row in bench.rows:
        row |= {"machine": machine(), "threads": bench.threads}
    folder = os.path.join(os.path.dirname(bench.build), "bench")
    os.makedirs(folder, exist_ok=True)
    with open(os.path.join(folder, "results.json"), "w") as file:
        json.dump(bench.rows, file, indent=1)
    print(f"wrote {os.path.join(folder, 'results.json')}")


if __name__ == "__main__":
    main()
