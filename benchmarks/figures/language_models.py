"""Text that a random Qwen 3 writes, its training, and a tokenizer, beside Hugging Face's on the
same files. Tokens must be the same, losses nearly."""

import json
import os
import subprocess
import sys
import tempfile

from bench import HERE

TINY = ("0.13 M parameters", ["--vocabulary", "512", "--hidden", "64", "--layers", "2"])
SMALL = (
    "8.4 M parameters",
    ["--vocabulary", "8192", "--hidden", "256", "--layers", "8", "--head-dim", "64"],
)


def beside(bench, what, path, flags, sizes=()):
    program = [bench.program("bench_language_model"), what, path]
    theirs, mine = bench.alternating(
        lambda: bench.peer("language_model.py", 1, what, path, *flags, *sizes),
        lambda: json.loads(bench.run([*program, "--threads", str(bench.threads), *flags])),
    )
    return mine, theirs


def rows(bench, name, mine, theirs, bar, times=1):
    """What `times` of something took."""
    for suffix, key, least in ("", "ms", bar), (", CPU time", "cpu_ms", None):
        each = lambda runs: [run[key] / times for run in runs]
        bench.row(f"{name}{suffix} / Hugging Face", each(mine), each(theirs), "ms", least)


def generation(bench):
    tokens = 4 if bench.args.check else 64
    steps = ["--steps", "1" if bench.args.check else "5"]
    for title, sizes in [TINY] if bench.args.check else [TINY, SMALL]:
        with tempfile.TemporaryDirectory() as folder:
            for batch in (1, 4):
                flags = [*steps, "--tokens", str(tokens), "--batch", str(batch)]
                mine, theirs = beside(bench, "generate", folder, flags, sizes)
                if mine[0]["result"] != theirs[0]["result"]:
                    sys.exit(f"{title}, {batch} sequences: other tokens than the peer's")
                bar = 3 if batch == 1 else None
                rows(bench, f"a token of {batch} x {title}", mine, theirs, bar, tokens)


def training(bench):
    title, sizes = TINY if bench.args.check else SMALL
    flags = ["--steps", "1", "--batch", "2", "--length", "16"]
    if not bench.args.check:
        flags = ["--steps", "6", "--batch", "8", "--length", "128"]
    with tempfile.TemporaryDirectory() as folder:
        mine, theirs = beside(bench, "train", folder, flags, sizes)
    pairs = list(zip(mine[0]["result"], theirs[0]["result"]))
    if any(abs(a - b) > 1e-3 * abs(b) for a, b in pairs):
        sys.exit(f"training, {title}: losses apart from the peer's: {pairs}")
    rows(bench, f"a step of {title}, Qwen 3's layout", mine, theirs, 1)


def tokenizer(bench):
    """A tokenizer that is trained on this project's sources encodes them."""
    source = os.path.dirname(HERE)
    names = [
        os.path.join(folder, name)
        for top in ("src", "docs", "include", "tests")
        for folder, _, names in os.walk(os.path.join(source, top))
        for name in names
        if name.endswith((".cpp", ".h", ".md", ".py"))
    ]
    names = sorted(names)[: 40 if bench.args.check else None]
    with tempfile.TemporaryDirectory() as folder:
        corpus = os.path.join(folder, "corpus.txt")
        with open(corpus, "wb") as file:
            for name in names:
                file.write(open(name, "rb").read())
        train = ["tokenize", corpus, "--to", os.path.join(folder, "to"), "--vocabulary", "4096"]
        subprocess.run([bench.program("lockstep"), *train], check=True, capture_output=True)
        path = os.path.join(folder, "to", "tokenizer.json")
        steps = ["--steps", "1" if bench.args.check else "5", "--corpus", corpus]
        mine, theirs = beside(bench, "encode", path, steps)
        if mine[0]["result"] != theirs[0]["result"]:
            sys.exit("tokenizer: other tokens than the peer's")
        megabytes = os.path.getsize(corpus) / 1e6
    rows(bench, "encoding of 1 MB of sources", mine, theirs, 1, megabytes)


FIGURES = {"generation": generation, "qwen3": training, "tokenizer": tokenizer}
