"""all_reduce beside Gloo's."""
import json


def all_reduce(bench, ranks):
    def ours():
        line = json.loads(bench.launched(ranks, bench.program("bench_all_reduce")))
        return {r["bytes"]: r for r in line["rows"]}

    def gloo():
        limit = ["--max-bytes", "65536"] if bench.args.check else ["--max-bytes", str(25 << 20)]
        line = bench.peer("allreduce.py", ranks, "--ops", "all_reduce", *limit)
        return {r["bytes"]: r["latency_us"][1] for r in line["rows"]}

    mine, theirs = bench.alternating(ours, gloo)
    # 16 MiB is not among ours, 25 MiB is.
    bars = {2: {25 << 20: (12, 3), 64 << 10: (20, None)}, 4: {25 << 20: (8, None), 64 << 10: (8, None)}}[ranks]
    for size in [s for s in mine[0] if s in theirs[0]]:
        gloo_us = [t[size] for t in theirs]
        text = f"{size >> 20} MiB" if size >= 1 << 20 else f"{size >> 10} KiB" if size >= 1 << 10 else f"{size} B"
        place, private = bars.get(size, (None, None))
        bench.row(f"all_reduce {text}, {ranks} ranks, group memory / Gloo", [m[size]["in_place_us"] for m in mine],
                 gloo_us, "us", place)
        bench.row(f"all_reduce {text}, {ranks} ranks, private tensors / Gloo", [m[size]["private_us"] for m in mine],
                 gloo_us, "us", private)
    if ranks == 2:
        size = 25 << 20
        bench.row("all_reduce 25 MiB, 2 ranks / read-add-write of the bytes", [m[size]["in_place_us"] for m in mine],
                 [m[size]["read_add_write_us"] for m in mine], "us", 1.3, upper=True)


FIGURES = {"all_reduce-2": lambda bench: all_reduce(bench, 2), "all_reduce-4": lambda bench: all_reduce(bench, 4)}
