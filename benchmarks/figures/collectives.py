"""all_reduce beside Gloo's."""
import json
import os
import sys
import tempfile

from bench import HERE

sys.path.append(os.path.join(HERE, "..", "tests"))
from support.hosts import Hosts  # noqa: E402


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


def two_hosts(bench):
    """Two pretended hosts of two ranks (needs root), each with a link of 1 Gbit/s of its own."""
    size, steps = (1 if bench.args.check else 25) << 20, 1 if bench.args.check else 7
    with tempfile.TemporaryDirectory() as folder, Hosts(folder, 2) as hosts:
        for host in 1, 2:
            hosts.do("rate", host, "1gbit")

        def first_line(command, **variables):
            ranks = hosts.start_ranks(command, 2, **variables)
            said = [rank.communicate(timeout=600) for rank in ranks]
            if ranks[0].returncode != 0:
                sys.exit(f"{command} failed:\n{said[0][1][-4000:]}")
            return json.loads([line for line in said[0][0].splitlines() if line.startswith("{")][-1])

        def gloo():
            line = first_line([bench.args.python, os.path.join(HERE, "peers", "allreduce.py"), "--ops", "all_reduce",
                               "--sizes", size, "--steps", steps], GLOO_SOCKET_IFNAME="eth0")
            return line["rows"][-1]["latency_us"][1] / 1e3

        mine, theirs = bench.alternating(lambda: first_line([bench.program("bench_wire"), size, steps])["ms"], gloo)
    # Each host has to send half of the data, and half of the sum.
    wire = size * 8 / 1e9 * 1e3
    bench.row("all_reduce 25 MiB, 2 hosts x 2 ranks, 1 Gbit/s / the wire's time", mine, [wire], "ms", 1.1, upper=True)
    bench.row("all_reduce 25 MiB, 2 hosts x 2 ranks, 1 Gbit/s / Gloo", mine, theirs, "ms", 1)


FIGURES = {"all_reduce-2": lambda bench: all_reduce(bench, 2), "all_reduce-4": lambda bench: all_reduce(bench, 4),
           "hosts": two_hosts}
