"""Trains a small network by DistributedDataParallel: train_ddp.py BACKEND RENDEZVOUS_FILE OUT

An unchanged program, but for the backend's name. Rank 0 writes the parameters and the losses to OUT.
"""
import os
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

backend, rendezvous, out = sys.argv[1:]
rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
torch.set_num_threads(1)
dist.init_process_group(backend, init_method=f"file://{rendezvous}", rank=rank, world_size=world)
torch.manual_seed(rank)  # rank 0's parameters are everybody's


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(50, 16, sparse=True)
        self.layers = nn.Sequential(nn.Linear(16, 400), nn.BatchNorm1d(400), nn.ReLU(), nn.Linear(400, 1000), nn.ReLU(),
                                    nn.Linear(1000, 10))

    def forward(self, tokens):
        return self.layers(self.words(tokens).mean(1))


losses = []
state = []
for kind in ({}, {"find_unused_parameters": True}, {"static_graph": True, "gradient_as_bucket_view": True}):
    net = Net()
    if kind:
        net.words = nn.Embedding(50, 16)  # sparse gradients go with neither
    model = DistributedDataParallel(net, **kind)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    data = torch.Generator().manual_seed(7)
    tokens = torch.randint(50, (64, 5), generator=data)
    labels = tokens.sum(1) % 10
    for step in range(4):
        part = slice(16 * rank, 16 * rank + 16)
        with model.no_sync() if step == 1 else torch.enable_grad():
            loss = nn.functional.cross_entropy(model(tokens[part]), labels[part])
            loss.backward()
        if step == 1:
            continue
        optimizer.step()
        optimizer.zero_grad()
        total = loss.detach().clone()
        dist.all_reduce(total)
        losses.append(total.item() / world)
    state.append({name: tensor.clone() for name, tensor in net.state_dict().items()})
if rank == 0:
    torch.save({"losses": losses, "state": state}, out)
dist.destroy_process_group()
