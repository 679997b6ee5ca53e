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


def clip_grad_norm():
    """For each norm type and limit: the norm, then the first element of each clipped gradient."""
    for p in (2.0, 1.0, 3.5, float("inf")):
        for limit in (0.7, 1e9):
            generator = torch.Generator().manual_seed(3)
            parameters = []
            for size in (5, 400, 1):
                parameters.append(torch.nn.Parameter(torch.zeros(size)))
                parameters[-1].grad = torch.randn(size, generator=generator)
            yield torch.nn.utils.clip_grad_norm_(parameters, limit, norm_type=p)
            yield from (parameter.grad[0] for parameter in parameters)


def grad_scaler():
    """For each of 16 steps: scale, growth tracker, weight. Then the default scale."""
    weight = torch.nn.Parameter(torch.full((2,), 0.5))
    sgd = torch.optim.SGD([weight], lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=3)
    for step in range(16):
        sgd.zero_grad()
        factor = {3: float("inf"), 4: float("nan"), 9: float("inf")}.get(step, 1.0)
        scaler.scale((weight * weight).sum() * factor).backward()
        if step % 2 == 1:
            scaler.unscale_(sgd)
        scaler.step(sgd)
        scaler.update()
        yield from (scaler.get_scale(), scaler._get_growth_tracker(), weight[0].item())
    yield torch.amp.GradScaler("cpu").get_scale()


CASES = (sync_batch_norm, clip_grad_norm, grad_scaler)

if __name__ == "__main__":
    for number in {case.__name__: case for case in CASES}[sys.argv[1]]():
        print(f"{float(number):.17g}")
