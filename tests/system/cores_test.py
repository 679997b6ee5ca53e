"""The tests that a number of cores or an instruction set could change, on machines that have others.

python3 cores_test.py SOURCE_DIR BUILD_DIR

OMP_NUM_THREADS is set for none: what ranks and their threads compute with is for the library to settle.
"""
import pathlib
import sys

from support.program import run, run_cases

BUILD = pathlib.Path(sys.argv[2])

# What compares bits of kernels, or counts threads.
SENSITIVE = {
    "comm": "Threads.*:World.IsOneRank*:World.KnowsItsPlace:World.SaysToWhich*",
    "data": "LoaderThreads.*",
    "device": "DdpOnDevice.*",
    "parallel": "Models.*:FusedAdam.*:SyncBatchNorm.*:*ZeroWorlds.*shm2:-*Python*",
}


def on_cores(count, **instruction_sets):
    for room, tests in SENSITIVE.items():
        done = run(BUILD / f"bin/test_{room}", f"--gtest_filter={tests}", "--gtest_brief=1", PRETEND_CORES=str(count),
                   OMP_NUM_THREADS=None, LD_PRELOAD=str(BUILD / "lib/libpretend_cores.so"), **instruction_sets)
        done.expect(out=r"PASSED  \] [1-9]")


def test_one_core(_):
    on_cores(1, ATEN_CPU_CAPABILITY="default", DNNL_MAX_CPU_ISA="SSE41")


def test_two_cores(_):
    on_cores(2, ATEN_CPU_CAPABILITY="avx2", DNNL_MAX_CPU_ISA="AVX2")


def test_four_cores(_):
    on_cores(4)


def test_eight_cores(_):
    on_cores(8, ATEN_CPU_CAPABILITY="default", DNNL_MAX_CPU_ISA="AVX2")


if __name__ == "__main__":
    run_cases([test_one_core, test_two_cores, test_four_cores, test_eight_cores])
