"""Starting ranks, and losing one, beside torchrun.

Ours meet, build a small model and wrap it in Ddp before they are ready; torchrun's only meet.
"""
import os
import re
import subprocess
import time

from bench import HERE


def launcher(bench, ranks, *words):
    return [bench.program("lockstep"), "run", "--nproc-per-node", str(ranks), *words]


def torchrun(bench, ranks, *words):
    return [bench.args.python, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks), *words,
            os.path.join(HERE, "peers", "startup.py")]


def until(bench, command, word, **environment):
    """Seconds from the start of a command to its line "WORD NS", by the clock that both read."""
    start = time.monotonic_ns()
    out = bench.run(command, lambda said: word in said, **environment)
    return (int(re.search(rf"{word} (\d+)", out)[1]) - start) * 1e-9


def milliseconds(call):
    start = time.monotonic()
    call()
    return (time.monotonic() - start) * 1e3


def start(bench, ranks):
    mine, theirs = bench.alternating(
        lambda: until(bench, launcher(bench, ranks, bench.program("fault_trainer"), "0"), "training"),
        lambda: until(bench, torchrun(bench, ranks), "ready", GLOO_SOCKET_IFNAME="lo"))
    bench.row(f"start to all ranks past the first barrier, {ranks} ranks", mine, theirs, "s", 5)

    def alone():
        for started in [subprocess.Popen(["true"]) for _ in range(ranks)]:
            started.wait()

    own, bare = bench.alternating(lambda: milliseconds(lambda: bench.run(launcher(bench, ranks, "true"))),
                                  lambda: milliseconds(alone))
    share = [a - b for a, b in zip(own, bare)]
    bench.row(f"the launcher's own share, {ranks} ranks / 20 ms", share, [20] * len(share), "ms", 1, upper=True)


def death(bench):
    """A rank killed in training: when the other knows, when the job is over, when it trains again after a restart."""
    fault = ["1", "5", "forward", "kill"]

    def ours():
        done = subprocess.run(launcher(bench, 2, bench.program("fault_trainer"), "100000", *fault), capture_output=True,
                              text=True, timeout=600)
        end, times = time.monotonic_ns(), dict(re.findall(r"(fault|known) (\d+)", done.stdout))
        return [(int(times["known"]) - int(times["fault"])) * 1e-9, (end - int(times["fault"])) * 1e-9]

    def again(command, word, **environment):
        """Seconds from the death to the second "WORD NS". A peer that fails by itself before (libtorch's threads now
        and then abort a Python rank) is started again."""
        for _ in range(5):
            out = bench.run(command, lambda said: word in said, **environment)
            died, ready = re.search(r"fault (\d+)", out), re.findall(rf"{word} (\d+)", out)
            if died and len(ready) == 2:
                return (int(ready[1]) - int(died[1])) * 1e-9
        raise SystemExit(f"{' '.join(command)} did not come back from one death in five attempts:\n{out}")

    mine, healed, peer = bench.alternating(
        ours,
        lambda: again(launcher(bench, 2, "--max-restarts", "1", bench.program("fault_trainer"), "20", *fault),
                      "training"),
        # With the store shared over attempts most of torchrun's restarts fail.
        lambda: again([*torchrun(bench, 2, "--max-restarts", "1"), "--kill"], "ready", GLOO_SOCKET_IFNAME="lo",
                      TORCH_DISABLE_SHARE_RDZV_TCP_STORE="1"))
    for name, index, bound in (("the other knows", 0, 0.5), ("the job is over", 1, 3.0)):
        bench.row(f"SIGKILL of a rank: {name} / {bound} s", [one[index] for one in mine], [bound] * len(mine), "s", 1,
                  upper=True)
    bench.row("SIGKILL of a rank, one restart: training again", healed, peer, "s", 3)


FIGURES = {"start-2": lambda bench: start(bench, 2), "start-8": lambda bench: start(bench, 8), "death": death}
