"""One of two ranks; the other is tests/comm/gloo/python_test.cpp.

Exits 0 when every result is right.
"""

import datetime
import os

import torch
import torch.distributed as dist

torch.set_num_threads(1)
dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=60))
rank, world = dist.get_rank(), dist.get_world_size()
assert world == 2
cpp = 1 - rank


def check(name, got, want):
    assert torch.equal(got, want), f"{name}: got {got}, want {want}"


FLOATS = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
for dtype in FLOATS + (torch.int32, torch.int64, torch.uint8):
    numbers = torch.arange(1, 1001, dtype=torch.int64).remainder(50).to(dtype)
    t = numbers * (rank + 1)
    dist.all_reduce(t)
    check(f"all_reduce {dtype}", t, numbers * 3)

    t = torch.full((7,), 5, dtype=dtype)
    dist.broadcast(t, src=rank)
    t = torch.zeros(7, dtype=dtype)
    dist.broadcast(t, src=cpp)
    check(f"broadcast {dtype}", t, torch.full((7,), 9, dtype=dtype))

    parts = [torch.zeros(3, dtype=dtype) for _ in range(world)]
    dist.all_gather(parts, torch.full((3,), rank + 1, dtype=dtype))
    check(f"all_gather {dtype}", torch.stack(parts), torch.tensor([[1] * 3, [2] * 3], dtype=dtype))

# Empty tensors: some of these are messages in Gloo, and some are not.
none = torch.zeros(0)
dist.all_reduce(none)
for root in range(world):
    dist.broadcast(none, src=root)
    dist.reduce(none, dst=root)
dist.all_gather([none, none], none)
dist.all_gather_into_tensor(none, none)
dist.reduce_scatter_tensor(none, none)
dist.all_to_all_single(none, none)
dist.all_to_all_single(none, none, [0, 0], [0, 0])
dist.recv(none, src=cpp, tag=1)
dist.send(none, dst=cpp, tag=2)
# One element, with strides of any kind on the other side.
t = torch.full((1,), 3.0)
dist.all_reduce(t)
check("all_reduce of one", t, torch.full((1,), 10.0))
dist.reduce(t, dst=rank)
check("reduce of one", t, torch.full((1,), 17.0))
dist.broadcast(t, src=rank)
parts = [torch.zeros(1), torch.zeros(1)]
dist.all_gather(parts, t)
check("all_gather of one", parts[cpp], torch.full((1,), 7.0))
out = torch.zeros(1)
dist.reduce_scatter_tensor(out, torch.full((2,), 1.0))
check("reduce_scatter of one", out, torch.full((1,), 8.0))
out = torch.zeros(2)
dist.all_to_all_single(out, torch.full((2,), 5.0))
check("all_to_all", out, torch.tensor([7.0, 5.0] if rank == 1 else [5.0, 7.0]))
out = torch.zeros(1)
dist.all_to_all_single(
    out, torch.full((1,), 5.0), [int(r == cpp) for r in range(2)], [int(r == cpp) for r in range(2)]
)
check("all_to_all of one", out, torch.full((1,), 7.0))
t = torch.full((2,), 3.0)
dist.all_reduce(t)
check("the sum of an average", t, torch.full((2,), 10.0))
out = torch.zeros(4)
dist.reduce_scatter_tensor(out, torch.arange(8.0) * (rank + 1))
check("reduce_scatter", out, torch.arange(4.0 * rank, 4.0 * rank + 4) * 3)
out = torch.zeros(4)
dist.all_to_all_single(out, torch.full((4,), float(rank)))
check("all_to_all", out, torch.tensor([0.0, 0.0, 1.0, 1.0]))
t = torch.zeros(5)
dist.recv(t, src=cpp, tag=3)
check("recv", t, torch.full((5,), 4.0))
dist.send(t * 2, dst=cpp, tag=4)
# A list of the other side: what is of one dtype goes as one tensor.
for t in (torch.full((6,), rank + 1.0), torch.full((2,), rank + 1.0, dtype=torch.float64)):
    dist.all_reduce(t)
    check("all_reduce of a list", t, torch.full_like(t, 3))
dist.barrier()
dist.destroy_process_group()
os._exit(0)  # the interpreter's own exit races libtorch's threads and sometimes aborts
