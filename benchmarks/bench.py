"""Runs programs and peers in turns, and keeps a table of ratios."""
import json
import os
import platform
import re
import statistics
import subprocess
import sys

HERE = os.path.dirname(os.path.abspath(__file__))


def machine():
    with open("/proc/cpuinfo") as file:
        model = next((line.split(":")[1].strip() for line in file if line.startswith("model name")), platform.machine())
    return f"{model}, {len(Bench.cores())} cores, {platform.system()} {platform.release()}"


class Bench:
    def __init__(self, args):
        self.args, self.build, self.rows = args, os.path.abspath(args.build), []
        self.repeats = 1 if args.check else args.repeats
        self.threads = args.threads  # of each rank, ours and theirs

    # Running things. Each returns the program's own figures.

    def run(self, command, enough=lambda output: False, **environment):
        """Standard output of a command that succeeds, or whose output is `enough` whatever came after it."""
        env = os.environ | {"OMP_NUM_THREADS": str(self.threads)} | environment
        done = subprocess.run(command, capture_output=True, text=True, env=env, timeout=600)
        if done.returncode != 0:
            said = f"{' '.join(command)} ended with {done.returncode}:\n{done.stdout[-2000:]}{done.stderr[-4000:]}"
            if not enough(done.stdout):
                sys.exit(said)
            cause = next((line for line in done.stderr.splitlines() if "terminate" in line or "Error" in line), "")
            print(f"note: a Python peer reported and then ended with {done.returncode}: {cause}", file=sys.stderr)
        return done.stdout

    @staticmethod
    def cores():
        return os.sched_getaffinity(0)

    def rank_counts(self):
        """2, and as many more as have a core each."""
        most = 2 if self.args.check else len(self.cores())
        return [2] + [ranks for ranks in (4, 8) if ranks <= most]

    def program(self, name):
        return os.path.join(self.build, "bin", name)

    def launched(self, ranks, *command, launcher=(), **environment):
        """Standard output of our ranks, without the rank tags."""
        out = self.run([self.program("lockstep"), "run", "--nproc-per-node", str(ranks), *launcher, *command],
                       **environment)
        return re.sub(r"^\[rank \d+\] ", "", out, flags=re.M)

    def preloading(self, allocator):
        """What `launched(launcher=["--memory-allocator", allocator])` has in its environment."""
        shown = self.run([self.program("lockstep"), "run", "--memory-allocator", allocator, "--print-env", "true"])
        return {"LD_PRELOAD": re.search("LD_PRELOAD=(.*)", shown).group(1)}

    def peer(self, script, ranks, *flags, **environment):
        """The JSON line of a Python peer; under torchrun when it has more than one rank.

        libtorch's own threads now and then abort a Python rank as it exits ("terminate called without an active
        exception"), after the line was printed: the figures stand.
        """
        python = [self.args.python]
        if ranks > 1:
            python += ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
        else:
            flags = ("--world", "1", *flags)
        flags = ("--threads", str(self.threads), *flags)
        lines = lambda out: [line for line in out.splitlines() if line.startswith("{")]
        out = self.run([*python, os.path.join(HERE, "peers", script), *flags], enough=lines, GLOO_SOCKET_IFNAME="lo",
                       **environment)
        return json.loads(lines(out)[-1])

    # Figures.

    def alternating(self, *measures):
        """Lists of results, one per measure; the measures take turns, so that a disturbance meets all."""
        results = [[] for _ in measures]
        for _ in range(self.repeats):
            for measure, into in zip(measures, results):
                into.append(measure())
        return results

    def row(self, name, ours, peer, unit, bar=None, upper=False, lower_is_better=True, paired=False):
        """One line. `ours` and `peer` are lists of repeats; an upper bar bounds ours / peer from above.
        Of repeats that took turns within one run (`paired`) the ratio is the median of each turn's own."""
        a, b = statistics.median(ours), statistics.median(peer)
        of = lambda ours, peer: ours / peer if upper or not lower_is_better else peer / ours
        ratio = statistics.median(map(of, ours, peer)) if paired else of(a, b)
        met = None if bar is None else ratio <= bar if upper else ratio >= bar
        sign = "<=" if upper else ">="
        self.rows.append(dict(name=name, ours=round(a, 4), peer=round(b, 4), unit=unit, ratio=round(ratio, 3),
                              bar=None if bar is None else f"{sign} {bar}", met=met, spread=dict(ours=ours, peer=peer)))
        shown = {True: "met", False: "NOT MET", None: ""}[met]
        print(f"{name:58} {a:12.5g} {b:12.5g} {unit:10} {ratio:8.2f} {self.rows[-1]['bar'] or '':>8} {shown}",
              flush=True)
