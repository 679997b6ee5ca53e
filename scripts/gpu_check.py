"""Builds Lockstep on a machine with a GPU and checks it there: scripts/gpu_check.sh, docs/gpu.md.

Every stage has a time limit and a log of its own, and the next one runs whatever came of it.
DIR/results.json is rewritten after each: {revision, machine, stages: [{name, status, why, seconds, log}],
figures: [{name, ours, peer, unit, ratio, bar, met}]}.
"""
import argparse
import contextlib
import json
import os
import pathlib
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time

import gpu_figures

SOURCE = pathlib.Path(__file__).resolve().parent.parent
TARGETS = ["on_gpu", "lockstep_tool", "bench_train_step", "bench_optimizer", "bench_checkpoint", "bench_all_reduce",
           "fault_trainer"]


class Failed(Exception):
    """A stage is over, with the reason."""


class NotRun(Exception):
    """There is nothing to run, with the reason."""


class Stage:
    """One stage that runs: its log, and what is left of its time."""

    def __init__(self, check, name, limit):
        self.check, self.name, self.cpu = check, name, check.args.cpu
        self.end = time.monotonic() + limit
        self.log = open(check.out / f"{name}.log", "w", buffering=1, errors="replace")

    def left(self):
        return self.end - time.monotonic()

    def run(self, *command, limit=None, must=True, **environment):
        """The output of a command, which is in the log, too. It and what it started end with their time."""
        command = [str(word) for word in command]
        limit = min(self.left(), limit or self.left())
        self.log.write(f"$ {' '.join([f'{k}={v}' for k, v in environment.items()] + command)}\n")
        if limit <= 0:
            raise Failed(f"no time is left for {command[0]}")
        begin = time.monotonic()
        # What it prints is wanted even if it has to be ended.
        output = self.check.out / f".{self.name}.output"
        with open(output, "wb") as file:
            # A request to end waits until there is something to end.
            signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
            wake = lambda: signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
            program = None
            try:
                program = subprocess.Popen(command, preexec_fn=wake, stdin=subprocess.DEVNULL, stdout=file,
                                           stderr=subprocess.STDOUT, start_new_session=True,
                                           env=os.environ | {k: str(v) for k, v in environment.items()})
                wake()
                status = program.wait(limit)
            except subprocess.TimeoutExpired:
                status = None
            finally:
                # Also where this program is asked to end.
                wake()
                if program is not None and program.poll() is None:
                    self.end_group(program)
        text = output.read_text(errors="replace")
        output.unlink()
        self.status = status
        ended = "ended after its limit" if status is None else f"exit status {status}"
        self.log.write(f"{text}{'' if text.endswith(chr(10)) or not text else chr(10)}"
                       f"= {ended}, {time.monotonic() - begin:.1f} s\n")
        if status != 0 and must:
            last = next((line for line in reversed(text.splitlines()) if line.strip()), "it printed nothing")
            how = f"ran past its {limit:.0f} s" if status is None else f"ended with {status}"
            raise Failed(f"{os.path.basename(command[0])} {how}: {last.strip()[:300]}")
        return text

    @staticmethod
    def end_group(program):
        """Ranks end with their launcher, which gets a while for it."""
        for number, wait in ((signal.SIGTERM, 5), (signal.SIGKILL, None)):
            try:
                os.killpg(program.pid, number)
            except ProcessLookupError:
                pass
            try:
                program.wait(wait)
                if number == signal.SIGKILL:
                    return
            except subprocess.TimeoutExpired:
                pass

    # What the stages run.

    def program(self, name):
        path = self.check.build / "bin" / name
        if not path.exists():
            raise Failed(f"there is no {path}: the stage build makes it")
        return path

    def device(self):
        return "cpu" if self.cpu else "cuda"

    def shares_gpu(self):
        """Whether several ranks can be on one GPU: NCCL refuses that. On the CPU always."""
        library = self.check.build / "lib" / "liblockstep.so"
        if not library.exists():
            raise Failed(f"there is no {library}: the stage build makes it")
        return self.cpu or b"cuda_ipc" in library.read_bytes()

    def memory_used(self):
        """MiB of the GPU's memory, by all programs."""
        if self.cpu:
            return 0
        return int(self.run("nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits").split()[0])

    def own_libraries(self):
        """The bundle's, for our programs: these know what they need, but not what those libraries need in turn."""
        folder = SOURCE / ".deps/debian/usr/lib/x86_64-linux-gnu"
        path = [str(folder) if folder.exists() else "", os.environ.get("LD_LIBRARY_PATH", "")]
        return {"LD_LIBRARY_PATH": ":".join(filter(None, path))} if any(path) else {}

    def launched(self, ranks, *command, must=True, limit=None, **environment):
        """The output of ranks, without the launcher's tags."""
        environment = {"LOCKSTEP_DEVICE": self.device(), "LOCKSTEP_TIMEOUT": 60} | self.own_libraries() | environment
        out = self.run(self.program("lockstep"), "run", "--nproc-per-node", ranks, *command, must=must, limit=limit,
                       **environment)
        return re.sub(r"^\[rank \d+\] ", "", out, flags=re.M)

    def checks(self, ranks, names=(), prefix=(), **environment):
        """Runs on_gpu's checks; those after one that ended the program run in another. Throws and names what failed."""
        left = list(names) or self.run(self.program("on_gpu"), "--list", **self.own_libraries()).split()
        failed, good = {}, []
        while left:
            asked = [self.program("on_gpu"), "--device", self.device(), *left]
            limit = self.left() / 2 if len(left) > 1 else self.left()
            out = self.launched(ranks, *prefix, *asked, must=False, limit=limit, **environment)
            passed = re.findall(r"^good (\w+) ", out, re.M)
            said = dict(re.findall(r"^FAILED (\w+): (.*)", out, re.M))
            begun = [name for name in left if name in passed or name in said]
            if not begun:
                errors = (line for line in reversed(out.splitlines()) if "error" in line.lower())
                said, begun = {left[0]: next(errors, "it said nothing and did not end")[:300]}, left[:1]
            elif len(begun) < len(left) and not said:
                # It ended, or hung, in the one after those that passed.
                lost = next(name for name in left if name not in begun)
                said, begun = {lost: "the program ended, or hung, in it"}, [*begun, lost]
            failed |= said
            good += passed
            left = [name for name in left if name not in begun]
        self.detail = f"{len(good)} good"
        if failed:
            raise Failed("; ".join(f"{name}: {why}" for name, why in failed.items()))
        if not good:
            raise Failed("no check ran")


# The stages. Each returns what to say of it beside "good", or throws.


def environment(stage):
    """What the machine has; nothing else runs on one without a GPU."""
    machine = stage.check.results["machine"]
    asked = {"driver": "nvidia-smi --query-gpu=name,driver_version,memory.total --format=csv,noheader",
             "nvcc": "nvcc --version", "compiler": "g++ --version", "cmake": "cmake --version",
             "ninja": "ninja --version", "libc": "ldd --version", "kernel": "uname -srm"}
    for name, command in asked.items():
        try:
            lines = stage.run(*command.split(), limit=20 * stage.check.args.patience).strip().splitlines()
            machine[name] = lines[-1 if name == "nvcc" else 0]
        except (Failed, FileNotFoundError, IndexError) as why:
            machine[name] = f"none: {why}"
    machine["cores"] = len(os.sched_getaffinity(0))
    report = ("import torch, json; cuda = torch.cuda.is_available(); print(json.dumps(dict("
              "torch=torch.__version__, cuda=torch.version.cuda, abi=torch._C._GLIBCXX_USE_CXX11_ABI, "
              "nccl='.'.join(map(str, torch.cuda.nccl.version())) if cuda else None, "
              "device=torch.cuda.get_device_name(0) if cuda else None, "
              "capability=torch.cuda.get_device_capability(0) if cuda else None, "
              "devices=torch.cuda.device_count())))")
    try:
        out = stage.run(stage.check.args.python, "-c", report, limit=60 * stage.check.args.patience)
        machine |= json.loads(out.strip().splitlines()[-1])
    except (Failed, FileNotFoundError, json.JSONDecodeError, IndexError) as why:
        machine["torch"] = f"none: {why}"
    if not stage.cpu and machine["driver"].startswith("none"):
        raise Failed("this machine has no NVIDIA GPU (nvidia-smi does not run): --cpu runs the same checks on the CPU")
    return f"{machine['driver']}; torch {machine['torch']}; {machine['cores']} cores"


def build(stage):
    """Against the libtorch of this machine's Python."""
    where = ("import importlib.util, os; "
             "print(os.path.dirname(os.path.dirname(importlib.util.find_spec('torch').origin)))")
    torch = os.environ.get("LOCKSTEP_TORCH") or stage.run(stage.check.args.python, "-c", where).strip().splitlines()[-1]
    stage.run("cmake", "-S", SOURCE, "-B", stage.check.build, "-G", "Ninja", "-DCMAKE_BUILD_TYPE=Release",
              "-DLOCKSTEP_UNITY=ON", "-DLOCKSTEP_WERROR=OFF", f"-DLOCKSTEP_TORCH_DIR={torch}", "-DLOCKSTEP_PYTHON=none")
    # What can be built is of use even if something else cannot.
    args = stage.check.args
    stage.run("ninja", "-k", "0", "-j", args.jobs, "-C", stage.check.build, *args.targets.split(","))


def one_rank(stage):
    """Every check with one rank: collectives over NCCL."""
    stage.checks(1)
    return stage.detail


def cuda_ipc(stage):
    """Ranks that share the GPU, on the transport for them; on the CPU over shared memory."""
    if not stage.shares_gpu():
        raise NotRun("this Lockstep has no transport cuda_ipc, and NCCL refuses two ranks on one GPU")
    failed = []
    for ranks in (2,) if stage.cpu else (2, 4, 8):
        try:
            stage.checks(ranks, LOCKSTEP_BACKEND="shm" if stage.cpu else "cuda_ipc")
        except Failed as why:
            failed.append(f"{ranks} ranks: {why}")
    if failed:
        raise Failed("; ".join(failed))


# Ranks, step, place and kind of fault_trainer's; the exit status; what has to be said of it.
FAULTS = {"killed": ("1 3 backward kill", 137, "rank 1 failed first: it was killed by SIGKILL"),
          "stopped": ("1 3 barrier stop", 1, "rank 1: .*its process was stopped"),
          "an exception": ("1 3 forward throw", 3, "row 17 is damaged"),
          "another count": ("1 3 barrier count", 1, "disagree|is not what the others called"),
          "another dtype": ("1 3 barrier dtype", 1, "disagree|is not what the others called")}


@contextlib.contextmanager
def mps(stage):
    """The environment with which processes compute on one GPU at the same time (NVIDIA's Multi-Process Service)."""
    with tempfile.TemporaryDirectory() as folder:
        environment = {"CUDA_MPS_PIPE_DIRECTORY": folder, "CUDA_MPS_LOG_DIRECTORY": folder}
        stage.run("nvidia-cuda-mps-control", "-d", limit=20, **environment)
        try:
            yield environment
        finally:
            stage.run("sh", "-c", "echo quit | nvidia-cuda-mps-control", limit=20, must=False, **environment)


def at_once(stage):
    """As cuda_ipc with 2 ranks, which compute at the same time by the grace of MPS: kernels wait, not streams."""
    if stage.cpu or shutil.which("nvidia-cuda-mps-control") is None:
        raise NotRun("there is no nvidia-cuda-mps-control")
    with mps(stage) as environment:
        stage.checks(2, LOCKSTEP_BACKEND="cuda_ipc", **environment)
    return stage.detail


def faults(stage):
    """One of two ranks is killed, is stopped, throws or calls something else: it is named, in time, nothing is left."""
    if not stage.shares_gpu():
        raise NotRun("this Lockstep has no transport cuda_ipc, and NCCL refuses two ranks on one GPU")
    before, problems = stage.memory_used(), []
    for name, (fault, status, words) in FAULTS.items():
        begin = time.monotonic()
        out = stage.launched(2, stage.program("fault_trainer"), "100000", *fault.split(), must=False, limit=25,
                             LOCKSTEP_TIMEOUT=5, LOCKSTEP_BACKEND="shm" if stage.cpu else "cuda_ipc")
        ended = time.monotonic_ns()
        happened = [int(time_ns) for time_ns in re.findall(r"^fault (\d+)", out, re.M)]
        late = (ended - min(happened)) * 1e-9 if happened else None
        if stage.status != status or not re.search(words, out) or late is None:
            was = "was" if re.search(words, out) else "was not"
            problems.append(f"{name}: exit status {stage.status} (expected {status}), {words!r} {was} said")
        elif late > 5 + 5:
            problems.append(f"{name}: it was over {late:.1f} s later")
        stage.log.write(f"# {name}: over {late} s after it, {time.monotonic() - begin:.1f} s in all\n")
    end = time.monotonic() + 5
    while (now := stage.memory_used()) > before + 64 and time.monotonic() < end:
        time.sleep(0.2)
    if now > before + 64:
        problems.append(f"{now - before} MiB of the GPU's memory are still in use")
    if problems:
        raise Failed("; ".join(problems))
    return f"{len(FAULTS)} faults"


def sanitizer(stage):
    """compute-sanitizer's memcheck and racecheck over some checks: one rank over NCCL, two on the GPU, where they take
    turns and, under MPS, where kernels wait."""
    if stage.cpu:
        raise NotRun("compute-sanitizer looks at GPUs only")
    if shutil.which("compute-sanitizer") is None:
        raise NotRun("there is no compute-sanitizer")
    program = [stage.program("on_gpu"), "--device", "cuda"]
    runs = [("memcheck", 1, ["average", "streams", "lifetimes", "ddp", "fused_adam", "autocast"]),
            ("memcheck", 2, ["average", "broadcast", "messages", "unequal_counts", "in_shared_memory", "ddp"]),
            ("racecheck", 2, ["average", "messages"])]
    at_once = [("memcheck", 2, ["average", "messages", "in_shared_memory", "graphs"]),
               ("racecheck", 2, ["average", "messages", "in_shared_memory"])]
    problems = []

    def look(tool, ranks, checks, **environment):
        try:
            # Each rank under one of its own: one that follows the launcher and all of its children does not end.
            out = stage.launched(ranks, shutil.which("compute-sanitizer"), "--tool", tool, "--report-api-errors", "no",
                                 *program, *checks, limit=60 * stage.check.args.patience, LOCKSTEP_TIMEOUT=300,
                                 **({"LOCKSTEP_BACKEND": "cuda_ipc"} if ranks > 1 else {}), **environment)
            found = re.findall(r"(?:ERROR SUMMARY:|RACECHECK SUMMARY:) (\d+)", out)
            if len(found) != ranks or any(int(number) for number in found):
                raise Failed(f"found {found or 'nothing, not even a summary'}")
        except Failed as why:
            problems.append(f"{tool} of {ranks} rank{'s' * (ranks > 1)}{' under MPS' * bool(environment)}: {why}")

    for run in runs:
        look(*run)
    if shutil.which("nvidia-cuda-mps-control") is None:
        at_once = []
    else:
        with mps(stage) as environment:
            for run in at_once:
                look(*run, **environment)
    if problems:
        raise Failed("; ".join(problems))
    return f"{len(runs) + len(at_once)} runs"


def figures(stage):
    """The issue's figures beside Python's torch."""
    rows = stage.check.results["figures"]
    problems = []
    for measure in stage.check.args.figures:
        try:
            rows += measure(stage)
        except (Failed, KeyError, IndexError, ValueError, TypeError, FileNotFoundError) as why:
            problems.append(f"{measure.__name__}: {why if isinstance(why, Failed) else repr(why)}")
        stage.check.write()
    for row in rows:
        verdict = {True: "met", False: "NOT MET", None: ""}[row["met"]]
        print(f"    {row['name']:58} {row['ours']:12.5g} {row['peer']:12.5g} {row['unit']:10} "
              f"{row['ratio']:8.3f} {row['bar'] or '':>8} {verdict}")
    if problems:
        raise Failed("; ".join(problems))
    return f"{len(rows)} figures"


# In this order; seconds.
STAGES = {environment: 90, build: 300, one_rank: 150, cuda_ipc: 180, at_once: 90, faults: 120, sanitizer: 150,
          figures: 400}


class Check:
    mps = staticmethod(mps)

    def __init__(self, args):
        self.args = args
        self.out = pathlib.Path(args.out).resolve()
        self.build = pathlib.Path(args.build).resolve()
        self.out.mkdir(parents=True, exist_ok=True)
        self.end = time.monotonic() + args.within
        self.results = {"revision": self.revision(), "machine": {}, "stages": [], "figures": []}

    @staticmethod
    def revision():
        recorded = SOURCE / ".deps/revision.txt"
        if recorded.exists():
            return recorded.read_text().strip()
        asked = subprocess.run(["git", "-C", SOURCE, "rev-parse", "HEAD"], capture_output=True, text=True)
        return asked.stdout.strip() or "unknown"

    def write(self):
        new = self.out / ".results.json"
        new.write_text(json.dumps(self.results, indent=1) + "\n")
        new.rename(self.out / "results.json")

    def run(self, stage, limit):
        """Whether the next one may run."""
        name, begin = stage.__name__, time.monotonic()
        limit = min(limit, self.end - begin)
        row = {"name": name, "status": "good", "why": "", "seconds": 0, "log": f"{name}.log"}
        if limit <= 0:
            row |= {"status": "not run", "why": f"the {self.args.within:.0f} s given are over", "log": None}
        else:
            try:
                row["why"] = stage(Stage(self, name, limit)) or ""
            except NotRun as why:
                row |= {"status": "not run", "why": str(why)}
            except Failed as why:
                row |= {"status": "FAILED", "why": str(why)}
        row["seconds"] = round(time.monotonic() - begin, 1)
        self.results["stages"].append(row)
        self.write()
        print(f"[gpu-check] {name}: {row['status']}, {row['seconds']} s{': ' if row['why'] else ''}{row['why']}",
              flush=True)
        return row["status"] != "FAILED" or stage is not environment


def main():
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    names = {stage.__name__: stage for stage in STAGES}
    parser = argparse.ArgumentParser(prog="gpu_check.sh", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("stages", nargs="*", metavar="STAGE",
                        help=f"of {', '.join(names)}: all, in this order, when none is given")
    parser.add_argument("--out", default=os.environ.get("OUT") or SOURCE / "build/gpu-check",
                        help="where logs and results.json go (%(default)s)")
    parser.add_argument("--build", default=SOURCE / "build/gpu", help="where the build is (%(default)s)")
    parser.add_argument("--jobs", type=int, default=len(os.sched_getaffinity(0)),
                        help="compilers that run at a time (%(default)s)")
    parser.add_argument("--targets", default=",".join(TARGETS), help="what the stage build builds (%(default)s)")
    parser.add_argument("--python", default="python3", help="the Python that has torch (%(default)s)")
    parser.add_argument("--within", type=float, default=1e6, metavar="SECONDS",
                        help="begin no stage, and end the last one, after this long")
    parser.add_argument("--patience", type=float, default=1, metavar="FACTOR",
                        help="of all time limits, for a slow machine (%(default)s)")
    figure_names = {measure.__name__: measure for measure in gpu_figures.ALL}
    parser.add_argument("--figures", default=",".join(figure_names), metavar="NAME,...",
                        help="what the stage figures measures (%(default)s)")
    parser.add_argument("--repeats", type=int, default=3, metavar="N",
                        help="of each figure and its peer, by turns (%(default)s)")
    parser.add_argument("--cpu", action="store_true",
                        help="the same checks on the CPU, which shows that they are right")
    parser.add_argument("--list", action="store_true", help="what the stages are")
    args = parser.parse_args()
    if args.list:
        for stage, limit in STAGES.items():
            print(f"{stage.__name__:12} {limit:4} s  {stage.__doc__}")
        return
    for what, known, given in (("stage", names, args.stages), ("figure", figure_names, args.figures.split(","))):
        unknown = [name for name in given if name not in known]
        if unknown:
            parser.error(f"no {what} is called {', '.join(unknown)}: there are {', '.join(known)}")
    args.figures = [figure_names[name] for name in args.figures.split(",")]
    check = Check(args)
    # Which machine it was is in every results.json.
    wanted = [stage for stage in STAGES if stage is environment or not args.stages or stage.__name__ in args.stages]
    for stage in wanted:
        if not check.run(stage, STAGES[stage] * args.patience):
            break
    rows = check.results["stages"]
    failed = [row["name"] for row in rows if row["status"] == "FAILED"]
    print(f"[gpu-check] {len(rows) - len(failed)} of {len(wanted)} stages without a failure; {check.out}/results.json")
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
