"""What PyTorch computes in one process, for the C++ tests to compare with.

usage: reference.py CASE
Prints numbers with 17 digits, which are a float64 exactly.
"""

import sys

import torch
from torch.optim import lr_scheduler as lr
from torch.optim import swa_utils

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


def two_groups(optimizer=torch.optim.SGD, **options):
    tensors = [torch.nn.Parameter(torch.zeros(1)) for _ in range(2)]
    groups = [{"params": [tensors[0]]}, {"params": [tensors[1]], "lr": 0.03}]
    return optimizer(groups, lr=0.1, **options)


SCHEDULES = {
    "constant": lambda o: lr.ConstantLR(o, factor=0.25, total_iters=7),
    "linear": lambda o: lr.LinearLR(o, start_factor=0.1, end_factor=0.9, total_iters=9),
    "step": lambda o: lr.StepLR(o, step_size=4, gamma=0.5),
    "multi_step": lambda o: lr.MultiStepLR(o, milestones=[3, 8, 8, 20], gamma=0.3),
    "exponential": lambda o: lr.ExponentialLR(o, gamma=0.93),
    "polynomial": lambda o: lr.PolynomialLR(o, total_iters=12, power=1.7),
    "cosine": lambda o: lr.CosineAnnealingLR(o, T_max=11, eta_min=0.001),
    "cosine_restarts": lambda o: lr.CosineAnnealingWarmRestarts(o, T_0=5, T_mult=2, eta_min=0.002),
    "cosine_restarts_alike": lambda o: lr.CosineAnnealingWarmRestarts(o, T_0=6),
    "sequential": lambda o: lr.SequentialLR(
        o,
        [lr.LinearLR(o, 0.01, 1.0, 6), lr.CosineAnnealingLR(o, T_max=20), lr.ExponentialLR(o, gamma=0.9)],
        milestones=[6, 26],
    ),
}


def schedules():
    """The rates of two groups at each of 40 steps, schedule after schedule."""
    for make in SCHEDULES.values():
        optimizer = two_groups()
        scheduler = make(optimizer)
        for _ in range(40):
            yield from (group["lr"] for group in optimizer.param_groups)
            optimizer.step()
            scheduler.step()


def one_cycle():
    """Rate of two groups and momentum (or beta1) at each of 30 steps, for three settings."""
    for optimizer, options in (
        (two_groups(momentum=0.9), {}),
        (two_groups(momentum=0.9), {"pct_start": 0.25, "anneal_strategy": "linear", "three_phase": True}),
        (two_groups(torch.optim.Adam), {"div_factor": 10.0, "final_div_factor": 50.0}),
    ):
        scheduler = lr.OneCycleLR(optimizer, max_lr=[0.1, 0.03], total_steps=30, **options)
        for _ in range(30):
            for group in optimizer.param_groups:
                yield group["lr"]
                yield group["betas"][0] if "betas" in group else group["momentum"]
            optimizer.step()
            scheduler.step()


def metric(step):
    return [5.0, 4.0, 4.0, 4.1, 3.99999, 3.0, 3.2, 3.3, 3.4, 3.1][step % 10] - (step // 10) * 0.5


def plateau():
    """The rates of two groups after each of 30 steps, for three settings."""
    for options in (
        {"patience": 1, "factor": 0.5},
        {"mode": "max", "threshold_mode": "abs", "threshold": 0.2, "patience": 2, "cooldown": 2},
        {"patience": 0, "factor": 0.2, "min_lr": 0.004, "eps": 0.001},
    ):
        optimizer = two_groups()
        scheduler = lr.ReduceLROnPlateau(optimizer, **options)
        for step in range(30):
            scheduler.step(metric(step))
            yield from (group["lr"] for group in optimizer.param_groups)


def fused_sgd():
    """All parameters after 20 steps, for four settings."""
    for options in (
        {"lr": 0.1},
        {"lr": 0.1, "weight_decay": 0.01},
        {"lr": 0.05, "momentum": 0.9, "dampening": 0.2},
        {"lr": 0.05, "momentum": 0.9, "nesterov": True, "weight_decay": 0.1},
    ):
        torch.manual_seed(0)
        net = torch.nn.Sequential(
            torch.nn.Linear(6, 8), torch.nn.Tanh(), torch.nn.Linear(8, 8), torch.nn.Tanh(), torch.nn.Linear(8, 3)
        )
        sgd = torch.optim.SGD(net.parameters(), fused=True, **options)
        for step in range(20):
            sgd.zero_grad()
            net(batch(0, step)).square().mean().backward()
            sgd.step()
        for parameter in net.parameters():
            yield from parameter.detach().flatten()


def weight_average():
    """Six averaged weights after each of 12 updates: EMA, then SWA."""
    for function in (swa_utils.get_ema_multi_avg_fn(0.9), swa_utils.get_swa_multi_avg_fn()):
        model = torch.nn.Linear(6, 1, bias=False)
        averaged = swa_utils.AveragedModel(model, multi_avg_fn=function)
        for step in range(12):
            with torch.no_grad():
                model.weight.copy_(torch.cos(torch.arange(6) * float(step)))
            averaged.update_parameters(model)
            yield from averaged.module.weight.detach().flatten()


def update_bn():
    """Statistics of 3 channels over six batches, the first of 8 samples and the others of 4, and how many those are."""
    net = torch.nn.Sequential(torch.nn.BatchNorm1d(3, momentum=0.4))
    elements = torch.arange(28 * 3, dtype=torch.float32).reshape(28, 3)
    swa_utils.update_bn([rows * torch.cos(rows) for rows in elements.split([8, 4, 4, 4, 4, 4])], net)
    yield from net[0].running_mean
    yield from net[0].running_var
    yield net[0].num_batches_tracked


CASES = (
    sync_batch_norm,
    clip_grad_norm,
    grad_scaler,
    schedules,
    one_cycle,
    plateau,
    fused_sgd,
    weight_average,
    update_bn,
)

if __name__ == "__main__":
    for number in {case.__name__: case for case in CASES}[sys.argv[1]]():
        print(f"{float(number):.17g}")
