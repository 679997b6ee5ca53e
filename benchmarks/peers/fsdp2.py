"""The transformer under PyTorch's FSDP2 (fully_shard) on a CPU, one unit a block: step time and memory."""
import common
import transformer


def main(rank, world, args):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    net = transformer.build(args)
    count = sum(p.numel() for p in net.parameters())
    mesh = init_device_mesh("cpu", (world,))
    for block in net.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(net, mesh=mesh)
    opt = transformer.adamw(net.parameters(), args.adamw)
    startup = common.now() - common.job_start()
    clock, losses = transformer.train(net, opt, transformer.synthetic(args, rank), args.steps, args.warmup, "fp32")
    common.report(args, rank, world, variant=f"fsdp2-{args.adamw}-w{args.width}x{args.layers}", params=count,
                  startup_s=round(startup, 3), **clock.fields(args.steps * args.batch * world),
                  final_loss=transformer.final(losses))


if __name__ == "__main__":
    common.launch(main, transformer.flags(__doc__).parse_args())
