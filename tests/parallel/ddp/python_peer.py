"""Trains the tests' Mlp in Python over Gloo, one thread a rank.

usage: python_peer.py RANKS [CASE...]   CASE: sgd|adam|adamw, plain|accumulate|clip, as "adamw-clip"
       Starts RANKS processes under DistributedDataParallel. Prints for each case the hash of the
       initial parameters, then for each step the ranks' losses, then the hash of the final
       parameters.
usage: python_peer.py mixed CASE
       Is one rank (RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT) of a group whose others need not be
       Python: averages the gradients by one all_reduce a step. Exits with 0 when all ranks end with
       the same parameters. CASE: adamw-plain, adamw-all (with what a program has beside), nothing
       (leaves when all have met).
"""

import contextlib
import os
import sys
import tempfile

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

STEPS = 100


def make_net():
    torch.manual_seed(0)
    return torch.nn.Sequential(
        torch.nn.Linear(6, 8),
        torch.nn.Tanh(),
        torch.nn.Linear(8, 8),
        torch.nn.Tanh(),
        torch.nn.Linear(8, 3),
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


def loss_of(net, rank, step):
    batch = torch.randn((4, 6), generator=torch.Generator().manual_seed(1000 * step + rank))
    return net(batch).square().mean()


def train(rank, ranks, case):
    optimizer_name, mode = case.split("-")
    net = make_net()
    initial = fnv1a(net.parameters())
    ddp = DistributedDataParallel(net) if ranks > 1 else net
    optimizer = make_optimizer(optimizer_name, net.parameters())
    losses = []
    for step in range(STEPS):
        optimizer.zero_grad()
        if mode == "accumulate":
            with ddp.no_sync() if ranks > 1 else contextlib.nullcontext():
                loss_of(ddp, rank, STEPS + step).backward()
        loss = loss_of(ddp, rank, step)
        loss.backward()
        if mode == "clip":
            torch.nn.utils.clip_grad_norm_(net.parameters(), 0.05)
        optimizer.step()
        losses.append(loss.item())
    everyone = [losses] * ranks
    if ranks > 1:
        dist.all_gather_object(everyone, losses)
    if rank == 0:
        print(initial)
        for of_step in zip(*everyone):
            print(*(f"{loss:.17g}" for loss in of_step))
        print(fnv1a(net.parameters()), flush=True)


def average_by_hand(net):
    flat = torch.cat([p.grad.flatten() for p in net.parameters()])
    dist.all_reduce(flat)
    flat /= dist.get_world_size()
    for p, part in zip(net.parameters(), flat.split([p.numel() for p in net.parameters()])):
        p.grad.copy_(part.view_as(p))


def train_plainly(net, optimizer):
    for step in range(STEPS):
        optimizer.zero_grad()
        loss_of(net, dist.get_rank(), step).backward()
        average_by_hand(net)
        optimizer.step()


def train_with_all(net, optimizer):
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 5, gamma=0.5)
    samples = torch.randn((18, 6), generator=torch.Generator().manual_seed(7))
    sampler = torch.utils.data.DistributedSampler(samples, seed=1)
    loader = torch.utils.data.DataLoader(samples, batch_size=4, sampler=sampler)
    for epoch in range(8):
        sampler.set_epoch(epoch)
        for x in loader:
            with torch.autocast("cpu", torch.bfloat16):
                loss = net(x).square().sum()
            count = torch.tensor([len(x)])
            dist.all_reduce(count)
            optimizer.zero_grad()
            (loss * (dist.get_world_size() / count.item())).backward()
            average_by_hand(net)
            torch.nn.utils.clip_grad_norm_(net.parameters(), 0.05)
            optimizer.step()
            scheduler.step()


def mixed(case):
    dist.init_process_group("gloo")
    if case == "nothing":
        dist.all_reduce(torch.ones(1))
        return 0
    net = make_net()
    name, what = case.split("-")
    {"plain": train_plainly, "all": train_with_all}[what](
        net, make_optimizer(name, net.parameters())
    )
    own = torch.cat([p.detach().flatten() for p in net.parameters()])
    parts = [torch.empty_like(own) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, own)
    return 0 if all(torch.equal(part, own) for part in parts) else 1


def ranks_of(count, cases):
    with tempfile.TemporaryDirectory() as folder:
        rank, children = 0, []
        for other in range(1, count):
            child = os.fork()
            if child == 0:
                rank, children = other, []
                break
            children.append(child)
        if count > 1:
            dist.init_process_group(
                "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=count
            )
        for case in cases:
            train(rank, count, case)
        if rank > 0:
            os._exit(0)
        return max(
            [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children], default=0
        )


if __name__ == "__main__":
    torch.set_num_threads(1)
    status = (
        mixed(sys.argv[2]) if sys.argv[1] == "mixed" else ranks_of(int(sys.argv[1]), sys.argv[2:])
    )
    sys.stdout.flush()
    os._exit(status)  # the interpreter's own exit races libtorch's threads and sometimes aborts
