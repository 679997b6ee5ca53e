"""Trains the tests' Mlp with Python DDP over Gloo, two forked ranks, 50 steps, one thread each.

usage: python_peer.py sgd|adam|adamw
Prints the hash of the initial parameters, then for each step the two ranks' losses, then the hash of the final parameters.
"""

import os
import sys
import tempfile

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

RANKS = 2
STEPS = 50


def make_net():
    torch.manual_seed(0)
    return torch.nn.Sequential(
        torch.nn.Linear(6, 8), torch.nn.Tanh(), torch.nn.Linear(8, 8), torch.nn.Tanh(), torch.nn.Linear(8, 3)
    )


def make_optimizer(name, parameters):
    if name == "sgd":
        return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)
    if name == "adam":
        return torch.optim.Adam(parameters, lr=1e-2, fused=True)
    return torch.optim.AdamW(parameters, lr=1e-2, weight_decay=0.1, fused=True)


def fnv1a(parameters):
    value = 0xCBF29CE484222325
    for parameter in parameters:
        for byte in parameter.detach().numpy().tobytes():
            value = (value ^ byte) * 0x100000001B3 % 2**64
    return value


def batch(rank, step):
    return torch.randn((4, 6), generator=torch.Generator().manual_seed(1000 * step + rank))


def main(rank, meeting_place, optimizer_name):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{meeting_place}", rank=rank, world_size=RANKS)
    net = make_net()
    initial = fnv1a(net.parameters())
    ddp = DistributedDataParallel(net)
    optimizer = make_optimizer(optimizer_name, net.parameters())
    losses = []
    for step in range(STEPS):
        optimizer.zero_grad()
        loss = ddp(batch(rank, step)).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    everyone = [None] * RANKS
    dist.all_gather_object(everyone, losses)
    if rank == 0:
        print(initial)
        for of_step in zip(*everyone):
            print(*(f"{loss:.17g}" for loss in of_step))
        print(fnv1a(net.parameters()), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        place = os.path.join(folder, "store")
        child = os.fork()
        main(1 if child == 0 else 0, place, sys.argv[1])
        if child == 0:
            os._exit(0)
        _, status = os.waitpid(child, 0)
        os._exit(os.waitstatus_to_exitcode(status))  # the interpreter's own exit races libtorch's threads and sometimes aborts
