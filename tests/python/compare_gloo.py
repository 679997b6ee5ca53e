"""Collectives and DDP over Lockstep and over Gloo, by turns in one run: compare_gloo.py [RANKS [ROUNDS]]

Prints medians in microseconds (private tensors, calls from Python), samples a second, ratios; the last line is JSON.
"""
import json
import os
import statistics
import sys
import tempfile
import time

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn

SIZES = {"64 KiB": 1 << 14, "25 MiB": 25 << 18}


def timed(call, repeats):
    laps = []
    for _ in range(repeats):
        dist.barrier()
        begin = time.perf_counter()
        call()
        laps.append(time.perf_counter() - begin)
    return statistics.median(laps[len(laps) // 5:])


def collectives():
    out = {}
    for name, count in SIZES.items():
        tensor = torch.ones(count)
        repeats = 200 if count < 1 << 20 else 12
        out[f"all_reduce {name}"] = 1e6 * timed(lambda: dist.all_reduce(tensor), repeats)
        if count < 1 << 20:
            out[f"all_reduce {name}, async"] = 1e6 * timed(
                lambda: dist.all_reduce(tensor, async_op=True).wait(), repeats)
        tensor.fill_(1)
    return out


def mnist(world):
    """The MLP of MNIST on random images: 60 steps of 64 samples a rank."""
    torch.manual_seed(0)
    model = nn.parallel.DistributedDataParallel(
        nn.Sequential(nn.Linear(784, 256), nn.ReLU(), nn.Linear(256, 10)),
        static_graph=True, gradient_as_bucket_view=True)
    adam = torch.optim.Adam(model.parameters(), 1e-3, fused=True)
    x, y = torch.rand(64 * 16, 784), torch.randint(10, (64 * 16,))
    laps = []
    for step in range(60):
        begin = time.perf_counter()
        part = slice(64 * (step % 16), 64 * (step % 16) + 64)
        adam.zero_grad()
        nn.functional.cross_entropy(model(x[part]), y[part]).backward()
        adam.step()
        laps.append(time.perf_counter() - begin)
    return 64 * world / statistics.median(laps[10:])


def rank_of(rank, world, backend, rendezvous, results):
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group(backend, init_method=f"file://{rendezvous}", rank=rank, world_size=world)
    out = collectives()
    out["MNIST DDP"] = mnist(world)
    if rank == 0:
        results.put(out)
    dist.barrier()
    dist.destroy_process_group()


def main():
    world, rounds = (int(a) for a in (sys.argv[1:] + ["2", "3"][len(sys.argv) - 1:])[:2])
    all_of = {"gloo": [], "lockstep": []}
    dist.Backend._ensure_backend_registered("lockstep")
    for _ in range(rounds):
        for backend, runs in all_of.items():
            with tempfile.TemporaryDirectory() as folder:
                context = mp.get_context("fork")
                results = context.SimpleQueue()
                ranks = [context.Process(target=rank_of, args=(r, world, backend, folder + "/meet", results))
                         for r in range(world)]
                for process in ranks:
                    process.start()
                runs.append(results.get())
                for process in ranks:
                    process.join()
    table = {}
    for name in all_of["gloo"][0]:
        gloo, ours = (statistics.median(run[name] for run in all_of[backend]) for backend in ("gloo", "lockstep"))
        ratio = ours / gloo if "DDP" in name else gloo / ours
        table[name] = {"gloo": round(gloo, 1), "lockstep": round(ours, 1), "ratio": round(ratio, 2)}
        print(f"{name:28} gloo {gloo:12,.1f}   lockstep {ours:12,.1f}   {ratio:6.2f}x")
    print(json.dumps({"ranks": world, "rounds": rounds, "figures": table}))


if __name__ == "__main__":
    main()
