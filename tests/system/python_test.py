"""torch.distributed over Lockstep, with Python ranks: DDP against Gloo, other calls, PyTorch's own
tests, ends.

python3 python_test.py SOURCE_DIR BUILD_DIR
"""

import os
import pathlib
import shutil
import subprocess
import sys
import tempfile
import unittest

SOURCE, BUILD = (pathlib.Path(a).resolve() for a in sys.argv[1:3])
PYTHON = SOURCE / ".deps" / "peers" / "bin" / "python"
PROGRAMS = SOURCE / "tests" / "python"
# Of PyTorch's tests those that take long over nothing: `make torch-suite` runs them all.
SUITE = [
    "test_send_recv_any_source",
    "test_send_recv_with_tag",
    "test_irecv",
    "test_broadcast",
    "test_reduce_product",
    "test_all_reduce_sum_async",
    "test_all_reduce_complex_unsupported_ops",
    "test_scatter_complex",
    "test_gather_checks",
    "test_all_gather_coalesced_with_empty",
    "test_all_to_all_single_unequal_split",
    "test_barrier_group",
    "test_DistributedDataParallelCPU",
    "test_static_graph_api_cpu",
    "test_gather_object_subgroup",
]


def environment(**more):
    env = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("LOCKSTEP_", "MASTER_"))
    }
    # A rank of many: torch's threads would take the cores from each other.
    env.update(PYTHONPATH=str(BUILD / "python"), OMP_NUM_THREADS="1", GLOO_SOCKET_IFNAME="lo")
    return env | more


def run_ranks(program, world, *arguments, hosts=None, python=PYTHON, **more):
    """One process a rank; raises when one fails or takes too long."""
    ranks = []
    for rank in range(world):
        own = {"LOCKSTEP_HOST": str(hosts[rank])} if hosts else {}
        ranks.append(
            subprocess.Popen(
                [python, PROGRAMS / program, *map(str, arguments)],
                text=True,
                env=environment(RANK=str(rank), WORLD_SIZE=str(world), **own, **more),
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
            )
        )
    failed = []
    for rank, process in enumerate(ranks):
        try:
            said, _ = process.communicate(timeout=120)
        except subprocess.TimeoutExpired:
            for other in ranks:
                other.kill()
            said = process.communicate()[0] + "\nhung"
        if process.returncode != 0:
            failed.append(f"rank {rank} ended with {process.returncode}: {said}")
    assert not failed, "\n".join(failed)


class Python(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = pathlib.Path(folder.name)

    def train(self, backend, **more):
        out = self.folder / f"{backend}-{len(list(self.folder.iterdir()))}.pt"
        run_ranks("train_ddp.py", 2, backend, self.folder / f"{out.name}-meet", out, **more)
        return out

    def test_ddp_ends_where_it_does_over_gloo(self):
        runs = [
            self.train("gloo"),
            self.train("lockstep"),
            self.train("lockstep", DDP_DISABLE_COMM_MEM="0"),
            self.train("lockstep", hosts=[0, 1]),
        ]
        compare = (
            "import sys, torch\nruns = [torch.load(path) for path in sys.argv[1:]]\n"
            "for run in runs[1:]:\n    torch.testing.assert_close(run, runs[0])\n"
            "print(runs[0]['losses'])"
        )
        done = subprocess.run(
            [PYTHON, "-c", compare, *runs], text=True, capture_output=True, timeout=60
        )
        self.assertEqual(done.returncode, 0, done.stderr)

    def test_calls(self):
        run_ranks("calls.py", 3, self.folder / "meet")
        run_ranks("calls.py", 3, self.folder / "meet-hosts", hosts=[0, 0, 1])

    def test_interpreters_start_and_end(self):
        done = subprocess.run(
            [PYTHON, PROGRAMS / "exits.py", "20"],
            text=True,
            capture_output=True,
            timeout=400,
            env=environment(),
        )
        self.assertEqual(done.returncode, 0, done.stdout + done.stderr)

    def test_a_subgroup_names_the_rank_that_was_killed(self):
        launcher = [BUILD / "bin/lockstep", "run", "--nproc-per-node", "4"]
        done = subprocess.run(
            [*launcher, PYTHON, PROGRAMS / "fates.py"],
            text=True,
            capture_output=True,
            timeout=120,
            env=environment(LOCKSTEP_PYTHON_PEERS="1"),
        )
        said = done.stdout + done.stderr
        self.assertEqual(done.returncode, 128 + 9, said)
        self.assertRegex(said, r"\[rank 2\] .*rank 3 was killed by SIGKILL")

    def test_another_torch_is_named_where_the_binding_cannot_be_loaded(self):
        package = self.folder / "lockstep"
        shutil.copytree(BUILD / "python/lockstep", package, ignore=shutil.ignore_patterns("_C*"))
        (package / "_C.py").write_text("raise ImportError('undefined symbol')")
        program = "import torch; torch.__version__ = '2.14.1'; import lockstep"
        done = subprocess.run(
            [PYTHON, "-c", program],
            text=True,
            capture_output=True,
            timeout=180,
            env=environment(PYTHONPATH=str(self.folder)),
        )
        self.assertRegex(done.stderr, r"built for torch [\d.]+, and this is torch 2[.]14[.]1: install")

    def test_the_wheel(self):
        def run(*words, **more):
            done = subprocess.run(
                [str(word) for word in words],
                text=True,
                capture_output=True,
                timeout=300,
                env=environment(PYTHONPATH="", **more),
            )
            self.assertEqual(done.returncode, 0, done.stdout + done.stderr)
            return done.stdout

        run(sys.executable, SOURCE / "packaging/python/build_wheel.py", BUILD, self.folder)
        (wheel,) = self.folder.glob("*.whl")
        venv, uv = self.folder / "venv", SOURCE / ".deps/tools/bin/uv"
        run(uv, "venv", "--python", PYTHON, venv)
        run(uv, "pip", "install", "--offline", "--no-deps", "--python", venv / "bin/python", wheel)
        # The torch of the peers, in the place of a second one.
        (site,) = venv.glob("lib/python*/site-packages")
        (torch,) = PYTHON.parents[1].glob("lib/python*/site-packages")
        (site / "peers.pth").write_text(f"{torch}\n")
        run_ranks(
            "train_ddp.py",
            2,
            "lockstep",
            self.folder / "meet",
            self.folder / "out.pt",
            python=venv / "bin/python",
            PYTHONPATH="",
        )
        program = (
            "import torch, torch.distributed as dist; dist.init_process_group('lockstep'); "
            "ones = torch.ones(3); "
            "dist.all_reduce(ones); print(ones.tolist()); dist.destroy_process_group()"
        )
        said = run(
            venv / "bin/lockstep",
            "run",
            "--nproc-per-node",
            2,
            venv / "bin/python",
            "-c",
            program,
            LOCKSTEP_PYTHON_PEERS="1",
        )
        for rank in range(2):
            self.assertIn(f"[rank {rank}] [2.0, 2.0, 2.0]", said)

    def test_pytorchs_own_tests(self):
        (self.folder / "barrier").mkdir()
        done = subprocess.run(
            [PYTHON, PROGRAMS / "torch_suite.py", *(f"TestLockstep.{name}" for name in SUITE)],
            text=True,
            capture_output=True,
            timeout=300,
            env=environment(
                BACKEND="lockstep", WORLD_SIZE="3", TEMP_DIR=str(self.folder), CI="true"
            ),
        )
        self.assertEqual(done.returncode, 0, done.stdout + done.stderr)


if __name__ == "__main__":
    unittest.main(argv=[sys.argv[0], *sys.argv[3:]], verbosity=2)
