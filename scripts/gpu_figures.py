"""The figures of scripts/gpu_check.py: ours beside Python's torch on the same GPU, by turns, with the bars to meet."""
import json
import pathlib
import shutil
import statistics

PEERS = pathlib.Path(__file__).resolve().parent.parent / "benchmarks/peers"
GPT_125M = dict(layers=12, width=768, heads=12, length=1024, vocab=25088)


def row(name, ours, peer, unit, bar=None, upper=False, lower_is_better=True):
    """Of lists; the ratio is how many times better `ours` is, or with an upper bar how much of the peer's it takes."""
    a, b = statistics.median(ours), statistics.median(peer)
    ratio = a / b if upper or not lower_is_better else b / a
    met = None if bar is None else ratio <= bar if upper else ratio >= bar
    shown = None if bar is None else f"{'<=' if upper else '>='} {bar}"
    return dict(name=name, ours=a, peer=b, unit=unit, ratio=round(ratio, 4), bar=shown, met=met,
                spread=dict(ours=ours, peer=peer))


def json_line(text):
    return json.loads([line for line in text.splitlines() if line.startswith("{")][-1])


def threads(stage):
    return "1" if stage.cpu else "4"


def ours(stage, program, *flags, ranks=1, **environment):
    out = stage.launched(ranks, stage.program(program), *flags, OMP_NUM_THREADS=threads(stage), **environment)
    return json_line(out)


def peer(stage, script, *flags, ranks=1, **environment):
    python = [stage.check.args.python]
    python += ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", ranks] if ranks > 1 else []
    alone = ["--world", "1"] if ranks == 1 else []
    out = stage.run(*python, PEERS / script, "--threads", threads(stage), "--device", stage.device(), *alone, *flags,
                    OMP_NUM_THREADS=threads(stage), **environment)
    return json_line(out)


def taking_turns_and_at_once(stage):
    """How ranks can share a GPU: what to add to a figure's name, and an environment."""
    yield "", {}
    if not stage.cpu and shutil.which("nvidia-cuda-mps-control"):
        with stage.check.mps(stage) as environment:
            yield ", MPS", environment


def by_turns(stage, *measures):
    results = [[] for _ in measures]
    for _ in range(1 if stage.cpu else stage.check.args.repeats):
        for measure, into in zip(measures, results):
            into.append(measure())
    return results


def gpt_flags(stage):
    """The 125 million parameters, and on a CPU, which only shows that it runs, very few."""
    shape = dict(layers=1, width=32, heads=2, length=16, vocab=64) if stage.cpu else GPT_125M
    return [word for name, value in shape.items() for word in (f"--{name}", str(value))]


def steps(stage, steps, warmup):
    return ["--steps", "2", "--warmup", "1"] if stage.cpu else ["--steps", str(steps), "--warmup", str(warmup)]


def transformer(stage):
    """bf16, 8 sequences of 1,024 tokens a step, AdamW in one pass on both sides."""
    flags = [*gpt_flags(stage), *steps(stage, 30, 8), "--batch", "2" if stage.cpu else "8", "--dtype", "bf16"]
    length = 16 if stage.cpu else GPT_125M["length"]
    mine, python = by_turns(stage, lambda: ours(stage, "bench_train_step", *flags, "--optimizer", "fused"),
                            lambda: peer(stage, "transformer.py", *flags, "--adamw", "fused"))
    tokens = lambda runs: [run["samples_per_s"] * length for run in runs]
    rows = [row("GPT of 125 M parameters, bf16, 1 rank / Python", tokens(mine), tokens(python), "tokens/s", 1.0,
                lower_is_better=False)]
    both = ours(stage, "bench_train_step", *flags, "--mode", "ddp,bare", "--turns", "2" if stage.cpu else "5")
    ddp, bare = both["samples_per_s"]["ddp"], both["samples_per_s"]["bare"]
    # How long a step is beside one of the bare loop.
    rows.append(row("  a step with Ddp / a bare loop", [1 / rate for rate in ddp], [1 / rate for rate in bare],
                    "s", 1.01, upper=True))
    return rows


def perceptron(stage):
    flags = [*steps(stage, 2000, 100), "--batch", "64"]
    mine, python = by_turns(
        stage,
        lambda: ours(stage, "bench_train_step", "--model", "mlp", "--optimizer", "fused", *flags),
        lambda: peer(stage, "perceptron.py", *flags))
    rate = lambda runs: [run["samples_per_s"] for run in runs]
    return [row("MNIST perceptron, 1 rank / Python", rate(mine), rate(python), "samples/s", 2.0, lower_is_better=False)]


def adamw(stage):
    if stage.cpu:
        mine, python = by_turns(stage, lambda: ours(stage, "bench_optimizer"),
                                lambda: peer(stage, "adamw.py", *gpt_flags(stage), "--steps", "2"))
    else:
        mine, python = by_turns(stage, lambda: ours(stage, "bench_optimizer", "gpt"),
                                lambda: peer(stage, "adamw.py", *gpt_flags(stage), "--steps", "30"))
        if mine[0]["elements"] != python[0]["elements"]:
            raise ValueError(f"other models: {mine[0]['elements']} and {python[0]['elements']} parameters")
    of = lambda runs, name: [run[name] for run in runs]
    return [row("AdamW's step, 125 M parameters / Python's fused", of(mine, "fused_ms"), of(python, "ms"), "ms", 1.0),
            row("  / copies of as many bytes", of(mine, "fused_ms"), of(mine, "floor_ms"), "ms", upper=True),
            row("  / torch::optim::AdamW", of(mine, "fused_ms"), of(mine, "torch_ms"), "ms")]


def save(stage):
    """1 GiB, while the training continues."""
    folder = stage.check.out / ".checkpoints"
    tensors = "1" if stage.cpu else "64"
    try:
        line = ours(stage, "bench_checkpoint", folder, "1" if stage.cpu else "3", "0", tensors)
    finally:
        stage.run("rm", "-rf", folder)
    return [row("asynchronous save of 1 GiB: stall / the copy to pinned memory",
                line["held_up_s"], line["copy_before_async_s"], "s", 1.2, upper=True)]


def all_reduce(stage):
    """Two ranks on one GPU, where Lockstep has a transport for that; Python has Gloo."""
    if not stage.shares_gpu():
        return []
    sizes = [64 << 10, 25 << 20] + ([] if stage.cpu else [400 << 20])
    backend = "shm" if stage.cpu else "cuda_ipc"
    rows = []
    for how, environment in taking_turns_and_at_once(stage):
        mine = ours(stage, "bench_all_reduce", ranks=2, LOCKSTEP_BACKEND=backend, **environment)["rows"]
        python = peer(stage, "allreduce.py", "--ops", "all_reduce", "--steps", "5", "--sizes", *map(str, sizes),
                      ranks=2, **environment)["rows"]
        for size, bar in zip(sizes, (10, 5, 5)):
            us = next(each for each in mine if each["bytes"] == size)
            theirs = next(each for each in python if each["bytes"] == size)["latency_us"][1]
            name = f"all_reduce, 2 ranks on one GPU{how}, {size >> 10} KiB / Gloo"
            rows.append(row(name, [us["in_place_us"]], [theirs], "us", bar))
            copied = [us["read_add_write_us"]]
            rows.append(row("  / a kernel that reads and writes the same bytes", [us["in_place_us"]], copied, "us"))
    return rows


def two_ranks(stage):
    """Ddp of two ranks on one GPU beside Python's DDP over Gloo."""
    if not stage.shares_gpu():
        return []
    flags = [*gpt_flags(stage), *steps(stage, 20, 5), "--batch", "2" if stage.cpu else "4", "--dtype", "bf16"]
    backend = "shm" if stage.cpu else "cuda_ipc"
    rate = lambda runs: [run["samples_per_s"] for run in runs]
    rows = []
    for how, environment in taking_turns_and_at_once(stage):
        mine, python = by_turns(
            stage,
            lambda: ours(stage, "bench_train_step", *flags, ranks=2, LOCKSTEP_BACKEND=backend, **environment),
            lambda: peer(stage, "transformer.py", *flags, "--adamw", "fused", ranks=2, **environment))
        rows.append(row(f"Ddp, 2 ranks on one GPU{how} / Python DDP over Gloo", rate(mine), rate(python),
                        "samples/s", 1.2, lower_is_better=False))
    return rows


ALL = [transformer, adamw, perceptron, save, all_reduce, two_ranks]
