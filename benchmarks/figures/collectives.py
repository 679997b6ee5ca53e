"""all_reduce beside Gloo's."""
import json
import os
import sys
import tempfile

from bench import HERE

sys.path.append(os.path.join(HERE, "..", "tests", "system"))
from support.hosts import Hosts  # noqa: E402


# Open MPI would bind two ranks to a core each: nobody's are bound. Both talk over shared memory.
MPIS = {"Open MPI": ("mpicxx.openmpi", ["mpirun.openmpi", "--allow-run-as-root", "--bind-to", "none",
                                        "--mca", "pml", "ob1", "--mca", "btl", "self,vader"]),
        "MPICH": ("mpicxx.mpich", ["mpirun.mpich"])}
MPI_SIZES = [8, 64 << 10, 25 << 20]


def text_of(size):
    return f"{size >> 20} MiB" if size >= 1 << 20 else f"{size >> 10} KiB" if size >= 1 << 10 else f"{size} B"


def mpi(bench, name, ranks):
    """Microseconds by size."""
    compiler, launcher = MPIS[name]
    program = os.path.join(bench.build, "bin", "all_reduce_" + compiler.removeprefix("mpicxx."))
    source = os.path.join(HERE, "peers", "all_reduce_mpi.cpp")
    if not os.path.exists(program) or os.path.getmtime(program) < os.path.getmtime(source):
        bench.run([compiler, "-std=c++20", "-O2", source, "-o", program])
    out = bench.run([*launcher, "-n", str(ranks), program, "8" if bench.args.check else "200", *map(str, MPI_SIZES)])
    return {int(size): us for size, us in json.loads(out).items()}


def all_reduce(bench, ranks):
    def ours():
        line = json.loads(bench.launched(ranks, bench.program("bench_all_reduce")))
        return {r["bytes"]: r for r in line["rows"]}

    def gloo():
        limit = ["--max-bytes", "65536"] if bench.args.check else ["--max-bytes", str(25 << 20)]
        line = bench.peer("allreduce.py", ranks, "--ops", "all_reduce", *limit)
        return {r["bytes"]: r["latency_us"][1] for r in line["rows"]}

    # An MPI that waits has no mercy on others: only with a core for each rank.
    others = list(MPIS) if ranks <= len(bench.cores()) else []
    mine, theirs, *by_mpi = bench.alternating(
        ours, gloo, *[lambda name=name: mpi(bench, name, ranks) for name in others])
    # 16 MiB is not among ours, 25 MiB is.
    bars = {2: {25 << 20: (12, 3), 64 << 10: (20, None)}, 4: {25 << 20: (8, None), 64 << 10: (8, None)}}.get(ranks, {})

    def rows(size, peer, peer_us, place=None, private=None):
        for where, key, bar in (("group memory", "in_place_us", place), ("private tensors", "private_us", private)):
            bench.row(f"all_reduce {text_of(size)}, {ranks} ranks, {where} / {peer}", [m[size][key] for m in mine],
                      peer_us, "us", bar)

    for size in [s for s in mine[0] if s in theirs[0]]:
        rows(size, "Gloo", [t[size] for t in theirs], *bars.get(size, ()))
    for name, runs in zip(others, by_mpi):
        for size in MPI_SIZES:
            rows(size, name, [run[size] for run in runs])
    if ranks == 2:
        size = 25 << 20
        bench.row("all_reduce 25 MiB, 2 ranks / read-add-write of the bytes", [m[size]["in_place_us"] for m in mine],
                 [m[size]["read_add_write_us"] for m in mine], "us", 1.3, upper=True)


def on_eight(bench):
    if 8 in bench.rank_counts():
        all_reduce(bench, 8)


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
           "all_reduce-8": on_eight,
           "hosts": two_hosts}
