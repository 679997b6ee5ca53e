"""What PyTorch computes in one process, for the C++ tests to compare with.

usage: reference.py CASE
Prints numbers with 17 digits, which are a float64 exactly.
"""

import sys

import torch

torch.set_num_threads(1)


def batch(rank, step):
    return torch.randn((4, 6), generator=torch.Generator().manual_seed(1000 * step + rank))


def sync_batch_norm():
    """Losses of 20 steps of BatchNorm on the batches of three ranks together."""
    torch.manual_seed(0)
    net = torch.nn.Sequential(
        torch.nn.Linear(6, 8), torch.nn.BatchNorm1d(8), torch.nn.Tanh(), torch.nn.Linear(8, 3)
    )
    sgd = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    for step in range(20):
        sgd.zero_grad()
        loss = net(torch.cat([batch(rank, step) for rank in range(3)])).square().mean()
        loss.backward()
        sgd.step()
        yield loss.item()
    yield from net[1].running_mean
    yield from net[1].running_var


if __name__ == "__main__":
    for number in {"sync_batch_norm": sync_batch_norm}[sys.argv[1]]():
        print(f"{float(number):.17g}")
