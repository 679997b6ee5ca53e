"""Checkpoints of 384 MB on one disk, beside torch.save, DCP, safetensors, dd and copies in memory.

All that is saved is flushed.
"""
import json
import os
import shutil
import statistics
import subprocess
import tempfile
import time


def checkpoints(bench):
    tensors = 2 if bench.args.check else 24
    steps = 4 if bench.args.check else 50
    root = tempfile.mkdtemp(prefix="checkpoints-", dir=os.path.dirname(bench.build))
    memory = tempfile.mkdtemp(prefix="lockstep-bench-", dir="/dev/shm")

    def ours(ranks, folder, steps=0):
        path = tempfile.mkdtemp(dir=folder)
        out = bench.launched(ranks, bench.program("bench_checkpoint"), path, "2", str(steps), str(tensors))
        line = json.loads(out.splitlines()[-1])
        shutil.rmtree(path)
        return {name: statistics.median(times) if isinstance(times, list) else times for name, times in line.items()}

    def theirs(method, ranks):
        options = ["--method", method, "--tensors", str(tensors), "--steps", "2", "--dir", root]
        line = bench.peer("ckpt.py", ranks, *options)
        return {name: line[name][1] for name in line if name.endswith("_s") and isinstance(line[name], list)}

    def dd():
        path = os.path.join(root, "dd")
        begin = time.monotonic()
        command = ["dd", "if=/dev/zero", f"of={path}", "bs=1M", f"count={16 * tensors}", "conv=fsync"]
        subprocess.run(command, check=True, capture_output=True)
        seconds = time.monotonic() - begin
        os.remove(path)
        return seconds

    try:
        two, one, fast, torch, dcp, dcp_async, safetensors, plain = bench.alternating(
            lambda: ours(2, root),
            lambda: ours(1, root),
            lambda: ours(2, memory),
            lambda: theirs("torch", 1),
            lambda: theirs("dcp", 2),
            lambda: theirs("dcp-async", 2),
            lambda: theirs("safetensors", 1),
            dd)
        run = [ours(2, root, steps)]
    finally:
        shutil.rmtree(root)
        shutil.rmtree(memory)
    of = lambda lines, *names: [sum(line[name] for name in names) for line in lines]
    what = f"{16 * tensors} MB"
    bench.row(f"asynchronous save of {what}, 2 ranks: held up / a copy of the share",
              of(two, "held_up_s"), of(two, "copy_before_async_s"), "s", 1.15, upper=True, paired=True)
    bench.row(f"asynchronous save of {what}, 2 ranks: held up / DCP async",
              of(two, "held_up_s"), of(dcp_async, "stall_s"), "s")
    bench.row("run that saves every 50 steps, 2 ranks / one that does not",
              of(run, "run_saving_s"), of(run, "run_s"), "s", 1.02, upper=True, paired=True)
    bench.row(f"save of {what}, 2 ranks / torch.save and fsync",
              of(two, "save_s"), of(torch, "save_s", "flush_s"), "s", 1.5)
    bench.row(f"save of {what}, 2 ranks / DCP, 2 ranks", of(two, "save_s"), of(dcp, "save_s", "flush_s"), "s", 2)
    bench.row(f"save of {what}, 2 ranks / dd with fsync", of(two, "save_s"), plain, "s", 0.8)
    bench.row(f"save of {what} to tmpfs, 2 ranks / a copy in memory",
              of(fast, "save_s"), of(fast, "copy_s"), "s", 0.6, paired=True)
    for kind in "warm", "cold":
        name = f"load_{kind}_s"
        bench.row(f"load of {what}, {kind}, 1 rank / torch.load", of(one, name), of(torch, name), "s", 2)
        bench.row(f"load of {what}, {kind}, 2 ranks / DCP, 2 ranks", of(two, name), of(dcp, name), "s", 2)
        bench.row(f"load of {what}, {kind}, 1 rank / Python's safetensors",
                  of(one, name), of(safetensors, name), "s", 1)


FIGURES = {"checkpoints": checkpoints}
