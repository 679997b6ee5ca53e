"""PyTorch's DistributedSampler, for comparison with ours.

Reads lines "length world rank seed epoch shuffle drop_last" and writes each followed by ":" and the indices. With
--record it takes the cases below instead; tests/data/sampler_cases.txt is its output under torch 2.15.0:
  .deps/peers/bin/python tests/data/sampler_cases.py --record > tests/data/sampler_cases.txt
"""
import itertools
import sys

from torch.utils.data import DistributedSampler


def recorded_cases():
    for length, world, seed, epoch, shuffle, drop in itertools.product(
            (1, 2, 3, 10, 11, 29), (1, 2, 3, 4, 7), (0, 1), (0, 3), (0, 1), (0, 1)):
        if not shuffle and (seed or epoch):
            continue
        for rank in range(world):
            yield length, world, rank, seed, epoch, shuffle, drop
    yield 0, 3, 1, 0, 0, 1, 0
    for seed, epoch in ((-1, 0), (2**31, 5), (2**63 - 6, 5), (123456789, 1000)):
        yield 40, 3, 2, seed, epoch, 1, 0


def indices(length, world, rank, seed, epoch, shuffle, drop_last):
    sampler = DistributedSampler(range(length), world, rank, bool(shuffle), seed, bool(drop_last))
    sampler.set_epoch(epoch)
    return list(sampler)


def main():
    cases = recorded_cases() if "--record" in sys.argv else ([int(word) for word in line.split()] for line in sys.stdin)
    for case in cases:
        print(*case, ":", *indices(*case))


if __name__ == "__main__":
    main()
