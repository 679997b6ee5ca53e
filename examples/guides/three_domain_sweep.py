#!/usr/bin/env python3
"""The guides' sweep over eight settings of three_domain, one run after another, and a table of them:

  three_domain_sweep.py build/release/bin/three_domain runs/sweep
  three_domain_sweep.py build/release/bin/three_domain runs/sweep --num-gpus 8 --model Qwen3-4B

What follows the folder goes to every run. Without --model the learning rates are as many times the tiny
model's default as the guides' are times theirs. Runs that have ended are not made again; with other flags
than theirs the sweep ends.
"""
import json
import pathlib
import subprocess
import sys


def settings(rate):
    base = {"--learning-rate": rate, "--beta": 0.1, "--group-size": 4}
    return {
        "baseline": base,
        "half the learning rate": base | {"--learning-rate": rate / 2},
        "twice the learning rate": base | {"--learning-rate": rate * 2},
        "half of beta": base | {"--beta": 0.05},
        "twice beta": base | {"--beta": 0.2},
        "groups of 8": base | {"--group-size": 8},
        "groups of 2": base | {"--group-size": 2},
        "no GRPO": base | {"--no-grpo": None},
    }


def main():
    if len(sys.argv) < 3:
        sys.exit(__doc__)
    program, folder, rest = sys.argv[1], pathlib.Path(sys.argv[2]), sys.argv[3:]
    has_model = any(word.split("=")[0] == "--model" for word in rest)
    lines = []
    for name, flags in settings(1e-6 if has_model else 3e-4).items():
        own = folder / name.replace(" ", "_")
        # One that has ended only writes its results again, and one with other flags refuses these.
        words = [word for flag, value in flags.items() for word in ([flag] if value is None else [flag, str(value)])]
        status = subprocess.run([program, *words, "--output-dir", str(own), "--resume", *rest]).returncode
        if status != 0:
            sys.exit(f"{name}: {program} ended with status {status}; start the sweep again to continue")
        matrix = json.loads((own / "results.json").read_text())["matrix"]
        rows, last = matrix["R"], matrix["R"][-1]
        learnt = [rows[min(j + 1, len(rows) - 1)][j] for j in range(len(last))]  # a joint run has one stage
        average, when_learnt = sum(last) / len(last), sum(learnt) / len(learnt)
        lines.append([name, *(f"{x:.3f}" for x in [*last, average, when_learnt])])
    head = ["setting", *matrix["columns"], "average", "when learnt"]
    widths = [max(len(line[i]) for line in [head, *lines]) for i in range(len(head))]
    for line in [head, *lines]:
        print("  ".join(text.ljust(width) if i == 0 else text.rjust(width)
                        for i, (text, width) in enumerate(zip(line, widths))))


if __name__ == "__main__":
    main()
