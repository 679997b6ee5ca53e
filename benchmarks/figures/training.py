"""Steps of a transformer and of a perceptron, beside Python DDP and beside a bare loop of our
own."""

import json


def steps_of(bench, model, full):
    """Fewer steps when only looking whether it runs."""
    count = 3 if bench.args.check else full
    return ["--model", model, "--steps", str(count), "--warmup", "1" if bench.args.check else "5"]


def ours(bench, ranks, *flags, launcher=(), **environment):
    return json.loads(
        bench.launched(
            ranks,
            bench.program("bench_train_step"),
            "--threads",
            str(bench.threads),
            *flags,
            launcher=launcher,
            **environment,
        )
    )


def rate(runs):
    return [run["samples_per_s"] for run in runs]


def transformer(bench):
    """The same model, data and AdamW as peers/transformer.py."""
    few = (
        ["--steps", "3", "--warmup", "1"]
        if bench.args.check
        else ["--steps", "20", "--warmup", "5"]
    )
    mine = lambda ranks, *flags: lambda: ours(bench, ranks, *steps_of(bench, "gpt", 20), *flags)
    peer = lambda ranks, *flags: lambda: bench.peer("transformer.py", ranks, *few, *flags)
    tuned = ["--adamw", "fused", "--bucket-view", "--static-graph"]
    names = ["one", "two", "py_one", "py_two", "py_tuned", "py_apart"]
    runs = dict(
        zip(
            names,
            bench.alternating(
                mine(1),
                mine(2, "--optimizer", "zero"),
                peer(1),
                peer(2),
                peer(2, *tuned),
                peer(2, "--mode", "independent", "--adamw", "fused"),
            ),
        )
    )
    row = lambda name, a, b, bar=None: bench.row(
        name, rate(runs[a]), rate(runs[b]), "samples/s", bar, lower_is_better=False
    )
    row("transformer fp32, 1 rank / Python", "one", "py_one", 0.99)
    row("transformer fp32, 2 ranks / Python DDP as it comes", "two", "py_two", 1.1)
    row("transformer fp32, 2 ranks / Python DDP, best-tuned", "two", "py_tuned", 1.02)
    row(
        "the same of Python: DDP, best-tuned / two independent ones", "py_tuned", "py_apart"
    )  # what this machine lets anybody reach
    row("transformer fp32, 2 ranks / 1 rank of ours", "two", "one")


def by_turns(bench, ranks, modes, model, steps, *flags):
    """The rates of several modes in the same processes, by turns of a second or two, so that a
    disturbance meets all."""
    turns = 1 if bench.args.check else 20
    run = ours(
        bench,
        ranks,
        "--mode",
        ",".join(modes),
        "--turns",
        str(turns),
        *steps_of(bench, model, steps),
        *flags,
    )
    return [run["samples_per_s"][mode] for mode in modes]


def with_and_without(bench):
    row = lambda name, ours, peer, bar=None: bench.row(
        name, ours, peer, "samples/s", bar, lower_is_better=False, paired=True
    )
    row(
        "transformer fp32, 1 rank with Ddp / a bare loop of ours",
        *by_turns(bench, 1, ["ddp", "bare"], "gpt", 4),
        0.99,
    )
    row(
        "perceptron, 1 rank with Ddp / a bare loop of ours",
        *by_turns(bench, 1, ["ddp", "bare"], "mlp", 1000, "--batch", "64"),
        0.99,
    )
    ddp, bare, barrier = by_turns(
        bench, 2, ["ddp", "bare", "barrier"], "gpt", 5, "--optimizer", "zero"
    )
    row("transformer fp32, 2 ranks / two independent ones of ours", ddp, bare, 0.985)
    row("the same / two that wait for each other, exchanging nothing", ddp, barrier)


def trainer(bench):
    """A Trainer beside the loop that it takes the place of, by turns of an epoch in the same
    processes."""
    for model, ranks, steps, batch, turns in (
        ("mlp", 1, 100, 64, 101),
        ("mlp", 2, 100, 64, 101),
        ("gpt", 1, 4, 8, 25),
        ("gpt", 2, 4, 8, 25),
    ):
        if bench.args.check:
            steps, turns = 2, 1
        program = [bench.program("bench_trainer"), "--model", model, "--batch", str(batch)]
        program += [f"--steps={steps}", f"--turns={turns}", f"--threads={bench.threads}"]
        rates = json.loads(bench.launched(ranks, *program))["samples_per_s"]
        bench.row(
            f"{model}, {ranks} rank{'s' * (ranks > 1)}: Trainer / a loop by hand",
            rates["trainer"],
            rates["loop"],
            "samples/s",
            0.99,
            lower_is_better=False,
            paired=True,
        )


def bfloat16(bench):
    """Which speed-up the narrower dtype gives, here and there."""
    few = ["--steps", "12", "--warmup", "4"]
    sizes = []
    if bench.args.check:  # a processor without bfloat16 takes seconds for a sample
        few, sizes = ["--steps", "2", "--warmup", "1"], ["--batch", "1"]
    gain = lambda fast, slow: [f / s for f, s in zip(rate(fast), rate(slow))]
    for allocator, title, bar in (("system", "", 1), ("tcmalloc", ", both with tcmalloc", None)):
        preloading = bench.preloading(allocator) if allocator != "system" else {}
        mine = lambda *flags: lambda: ours(
            bench,
            1,
            *steps_of(bench, "gpt", 12),
            *sizes,
            *flags,
            launcher=["--memory-allocator", allocator],
        )
        peer = lambda *flags: lambda: bench.peer(
            "transformer.py", 1, *few, *sizes, "--adamw", "fused", *flags, **preloading
        )
        wide, narrow, py_wide, py_narrow = bench.alternating(
            mine(), mine("--dtype", "bf16"), peer(), peer("--dtype", "bf16")
        )
        bench.row(
            f"transformer, speed-up of bf16 over fp32 / Python's{title}",
            gain(narrow, wide),
            gain(py_narrow, py_wide),
            "x",
            bar,
            lower_is_better=False,
        )
        bench.row(
            f"transformer bf16, 1 rank / Python{title}",
            rate(narrow),
            rate(py_narrow),
            "samples/s",
            lower_is_better=False,
        )


def optimizer(bench):
    def run():
        return json.loads(bench.run([bench.program("bench_optimizer")]))

    (runs,) = bench.alternating(run)
    column = lambda name: [r[name] for r in runs]
    bench.row(
        "AdamW over 16 Mi parameters, fused / torch::optim",
        column("fused_ms"),
        column("torch_ms"),
        "ms",
        5,
    )
    bench.row(
        "AdamW over 16 Mi parameters, fused / memory floor",
        column("fused_ms"),
        column("floor_ms"),
        "ms",
        1.2,
        upper=True,
    )


def divided_optimizer(bench):
    flags = steps_of(bench, "gpt", 12)
    whole, divided = bench.alternating(
        lambda: ours(bench, 2, *flags), lambda: ours(bench, 2, *flags, "--optimizer", "zero")
    )
    bench.row(
        "transformer, 2 ranks, update: divided / replicated",
        [r["update_us"] for r in divided],
        [r["update_us"] for r in whole],
        "us",
        0.6,
        upper=True,
    )


def accumulation(bench):
    """Communication per batch (of the rank that comes last, so without waiting), exchanging after
    every batch and after every fourth."""
    flags = [*steps_of(bench, "gpt", 12), "--batch", "2"]
    each, fourth = bench.alternating(
        lambda: ours(bench, 2, *flags), lambda: ours(bench, 2, *flags, "--accumulate", "4")
    )
    bench.row(
        "transformer, 2 ranks, accumulation 4: communication",
        [r["reducing_us"] / 4 for r in fourth],
        [r["reducing_us"] for r in each],
        "us/batch",
        0.25 * 1.1,
        upper=True,
    )


def lanes(bench):
    """Lanes beside what they take the place of: plain Ddp, or accumulation under hold(), of as many
    batches."""
    row = lambda name, pair, bar: bench.row(
        name, *pair, "samples/s", bar, lower_is_better=False, paired=True
    )
    flags = ["--optimizer", "fused", "--batch", "2"]
    row(
        "transformer, 2 ranks: 2 lanes / plain Ddp",
        by_turns(bench, 2, ["lanes", "ddp"], "gpt", 8, *flags),
        0.99,
    )
    row(
        "transformer, 1 rank: 8 lanes / accumulation over 8",
        by_turns(bench, 1, ["lanes", "ddp"], "gpt", 2, *flags, "--accumulate", "8"),
        0.97,
    )
    row(
        "transformer, 2 ranks: 8 lanes / accumulation over 4",
        by_turns(bench, 2, ["lanes", "ddp"], "gpt", 2, *flags, "--accumulate", "4"),
        0.97,
    )


def divided_model(bench):
    """A model divided over 2 ranks of one host, beside our Ddp and beside PyTorch's FSDP2; also
    where communication counts."""
    large = ["--width", "768", "--layers", "8", "--batch", "2", "--length", "64"]
    models = [
        ("5.3 M parameters", ["--batch", "8"], (1.22, 0.5)),
        ("63 M parameters", large, (2, 0.5)),
    ]
    for title, shape, bars in models[:1] if bench.args.check else models:
        few = (
            ["--steps", "3", "--warmup", "1"]
            if bench.args.check
            else ["--steps", "8", "--warmup", "2"]
        )
        flags = ["--model", "gpt", "--optimizer", "fused", *shape]
        turns = ["--turns", "1" if bench.args.check else "8", "--steps", "2", "--warmup", "1"]
        both = ours(bench, 2, "--mode", "fsdp,ddp", *flags, *turns)["samples_per_s"]
        bench.row(
            f"{title}, 2 ranks: Fsdp / Ddp of ours",
            both["fsdp"],
            both["ddp"],
            "samples/s",
            0.97,
            lower_is_better=False,
            paired=True,
        )
        # Freed memory goes back to the kernel, so that what is left is what is used.
        returned = {"MALLOC_MMAP_THRESHOLD_": "131072"}
        mine, theirs = bench.alternating(
            lambda: ours(bench, 2, "--mode", "fsdp", *flags, *few),
            lambda: bench.peer("fsdp2.py", 2, *few, *shape, "--adamw", "fused"),
        )
        one, *divided = bench.alternating(
            lambda: ours(bench, 1, "--mode", "bare", *flags, *few, **returned),
            *(
                lambda ranks=ranks: ours(bench, ranks, "--mode", "fsdp", *flags, *few, **returned)
                for ranks in (2, 4)
            ),
        )
        bench.row(
            f"{title}, 2 ranks: Fsdp / PyTorch FSDP2",
            rate(mine),
            rate(theirs),
            "samples/s",
            bars[0],
            lower_is_better=False,
        )
        memory = [run["pss_mb"] for run in mine]
        bench.row(
            f"{title}, memory of both ranks: Fsdp / PyTorch FSDP2",
            memory,
            [sum(run["end_pss_mb"]) for run in theirs],
            "MB",
            bars[1],
            upper=True,
        )
        for ranks, runs in zip((2, 4), divided):
            bench.row(
                f"{title}, memory: Fsdp's {ranks} ranks / one process",
                [run["pss_mb"] for run in runs],
                [run["pss_mb"] for run in one],
                "MB",
                1.25,
                upper=True,
            )
            bench.row(
                f"{title}, state of a rank of {ranks} / of one process",
                [run["kept_mb"] for run in runs],
                [run["kept_mb"] for run in one],
                "MB",
                1.05 / ranks,
                upper=True,
            )


def scaling(bench):
    """Weak: the batch per rank stays. Strong: the batch of all ranks stays."""
    print(
        "\n  scaling              ranks   samples/s   of ideal   step us"
        "   compute   waiting   reducing   overlapped"
    )
    for model, batch in (("mlp", 64), ("gpt", 8)):
        flags = [*steps_of(bench, model, 800 if model == "mlp" else 8), "--optimizer", "zero"]
        for kind in ("weak", "strong"):
            first = None
            for ranks in (1, 2, 4, *(n for n in bench.rank_counts() if n > 4)):
                size = batch if kind == "weak" else batch // ranks
                run = ours(bench, ranks, *flags, "--batch", str(size))
                first = first or run["samples_per_s"]
                waiting, reducing, overlap = (
                    run.get(name, 0) for name in ("waiting_us", "reducing_us", "overlap_us")
                )
                compute = run["step_us"] - waiting - reducing
                print(
                    f"  {model + ', ' + kind:20} {ranks:5} {run['samples_per_s']:11.0f} "
                    f"{run['samples_per_s'] / first / ranks:10.2f} {run['step_us']:9.0f} "
                    f"{compute:9.0f} {waiting:9.0f} {reducing:10.0f} {overlap:12.0f}"
                )
    print(f"  ({len(bench.cores())} cores)\n")


FIGURES = {
    "transformer": transformer,
    "bfloat16": bfloat16,
    "bare": with_and_without,
    "optimizer": optimizer,
    "divided": divided_optimizer,
    "fsdp": divided_model,
    "accumulation": accumulation,
    "lanes": lanes,
    "trainer": trainer,
    "scaling": scaling,
}
