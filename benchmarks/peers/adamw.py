"""One step of AdamW(fused=True) over the parameters of peers/transformer.py's model: `bench_optimizer gpt`'s peer."""
import statistics

import common
import torch
import transformer


def main(rank, world, args):
    net = transformer.build(args).to(args.device)
    for p in net.parameters():
        p.grad = torch.randn_like(p)
    adam = torch.optim.AdamW(net.parameters(), lr=1e-3, fused=True)
    times = []
    for _ in range(args.steps + 1):
        common.finish(args.device)
        begin = common.now()
        adam.step()
        common.finish(args.device)
        times.append(common.now() - begin)
    common.report(args, rank, world, elements=sum(p.numel() for p in net.parameters()),
                  ms=1e3 * statistics.median(times[1:]))


if __name__ == "__main__":
    common.launch(main, transformer.flags(__doc__).parse_args())
