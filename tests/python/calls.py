"""What Python programs call beside DDP: calls.py RENDEZVOUS_FILE. Exits 0 when every result is right."""
import datetime
import os
import sys

import torch
import torch.distributed as dist

rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
torch.set_num_threads(1)
dist.init_process_group("lockstep", init_method=f"file://{sys.argv[1]}", rank=rank, world_size=world)
assert dist.get_backend() == "lockstep"

objects = [None] * world
dist.all_gather_object(objects, {"rank": rank, "words": "x" * rank})
assert [o["rank"] for o in objects] == list(range(world))
word = [f"from {rank}"]
dist.broadcast_object_list(word, src=1)
assert word == ["from 1"]

# Ring exchange, as pipelines do it.
to, source = (rank + 1) % world, (rank - 1) % world
out, into = torch.full((100_000,), float(rank)), torch.empty(100_000)
for request in dist.batch_isend_irecv([dist.P2POp(dist.isend, out, to), dist.P2POp(dist.irecv, into, source)]):
    request.wait()
assert into[0] == source

# A wrong peer is an error of the call alone.
try:
    dist.batch_isend_irecv([dist.P2POp(dist.isend, out, rank)])
    raise SystemExit("a message to the rank itself was taken")
except ValueError:
    pass
one = torch.ones(1)
dist.all_reduce(one)
assert one.item() == world

# Tags in another order than they were sent in, then from anybody.
if rank == 0:
    requests = [dist.isend(torch.full((3,), float(tag)), 1, tag=tag) for tag in range(3)]
    for request in requests:
        request.wait()
    got = torch.empty(1)
    assert sorted(dist.recv(got) for _ in range(world - 1)) == list(range(1, world))
else:
    if rank == 1:
        for tag in (2, 0, 1):
            got = torch.empty(3)
            dist.recv(got, 0, tag=tag)
            assert got[0] == tag
    dist.send(torch.ones(1), 0)

for group in (dist.new_group([0, 1]), dist.new_group(list(range(world)))):
    if rank in dist.get_process_group_ranks(group):
        one = torch.ones(4)
        dist.all_reduce(one, group=group)
        assert one[0] == dist.get_world_size(group)

work = dist.all_reduce(torch.ones(1 << 20), async_op=True)
done = work.get_future().then(lambda future: future.value()[0][0].item())
assert done.wait() == world
work.wait()

# As PyTorch's PowerSGD hook does: the callback waits for a call of its own.
one, two = torch.ones(1 << 20), torch.ones(1 << 16)
chained = dist.all_reduce(one, async_op=True).get_future().then(
    lambda future: dist.all_reduce(two, async_op=True).get_future().wait()[0])
assert chained.wait()[0] == world

with dist._coalescing_manager(device=torch.device("cpu"), async_ops=True) as manager:
    several = [torch.full((n,), 1.0) for n in (3, 5)]
    for tensor in several:
        dist.all_reduce(tensor)
manager.wait()
assert all(tensor[0] == world for tensor in several)

flags = torch.tensor([1 << rank], dtype=torch.int32)
dist.all_reduce(flags, op=dist.ReduceOp.BXOR)
assert flags.item() == (1 << world) - 1
whole = torch.empty(world)
dist.all_to_all_single(whole, torch.full((world,), float(rank)))
assert whole.tolist() == list(range(world))

try:
    dist.all_gather([torch.empty(2)] * (world + 1), torch.empty(2))
    raise SystemExit("a list that is too long was taken")
except ValueError:
    pass
dist.monitored_barrier(timeout=datetime.timedelta(seconds=60))

# What the ranks disagree about is quoted on each of them.
try:
    dist.all_reduce(torch.ones(3 + rank))
    raise SystemExit("different sizes were summed")
except dist.DistBackendError as error:
    assert "disagree" in str(error) and "calls all_reduce sum" in str(error), error
dist.destroy_process_group()
