"""Steps of a perceptron 784-256-10 with AdamW on made tensors, in one process:
`bench_train_step --model mlp`'s peer.
"""
import common
import torch
import torch.nn.functional as F
from torch import nn


def main(rank, world, args):
    net = nn.Sequential(nn.Linear(784, 256), nn.ReLU(), nn.Linear(256, 10)).to(args.device)
    adam = torch.optim.AdamW(net.parameters(), lr=3e-4, weight_decay=0.01, fused=True)
    made = torch.Generator().manual_seed(args.seed)
    data = [(torch.rand(args.batch, 784, generator=made).to(args.device),
             torch.randint(10, (args.batch,), generator=made).to(args.device)) for _ in range(32)]
    clock, losses = common.Clock(), []
    for i in range(args.warmup + args.steps):
        x, y = data[i % len(data)]
        loss = F.cross_entropy(net(x), y)
        loss.backward()
        adam.step()
        adam.zero_grad()
        losses.append(loss.detach())
        if i + 1 in (args.warmup, args.warmup + args.steps):
            common.finish(args.device)
        clock.lap()
        if i + 1 == args.warmup:
            clock.restart()
    common.report(args, rank, world, **clock.fields(args.steps * args.batch), final_loss=losses[-1].item())


if __name__ == "__main__":
    p = common.parser(__doc__, world=1, steps=1000)
    p.add_argument("--warmup", type=int, default=50)
    p.add_argument("--batch", type=int, default=64)
    p.add_argument("--device", default="cpu")
    common.launch(main, p.parse_args())
