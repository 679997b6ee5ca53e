"""PyTorch's distributed_test.py over Lockstep, as far as it is neither for GPUs nor for one backend of PyTorch's own.

python3 run_torch_suite.py BUILD_DIR RANKS...  Prints what failed; status 1 when something else did than KNOWN.
"""
import os
import pathlib
import re
import subprocess
import sys
import tempfile

SOURCE = pathlib.Path(__file__).resolve().parents[2]
PYTHON = SOURCE / ".deps" / "peers" / "bin" / "python"
# The logger says "custom" of every backend that is not PyTorch's own.
KNOWN = {"test_ddp_logging_data_cpu"}


def one(build, ranks):
    with tempfile.TemporaryDirectory() as folder:
        os.mkdir(folder + "/barrier")
        env = {**os.environ, "PYTHONPATH": str(build / "python"), "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo",
               "BACKEND": "lockstep", "WORLD_SIZE": str(ranks), "TEMP_DIR": folder,
               "DISTRIBUTED_TESTS_DEFAULT_TIMEOUT": "60"}
        done = subprocess.run([PYTHON, SOURCE / "tests" / "python" / "torch_suite.py", "-v"], env=env, text=True,
                              capture_output=True)
    said = done.stdout + done.stderr
    failed = set(re.findall(r"^(?:FAIL|ERROR): (\w+)", said, re.MULTILINE))
    ran, skipped = (sum(map(int, re.findall(pattern, said, re.MULTILINE)))
                    for pattern in (r"^Ran (\d+) tests", r"\bskipped=(\d+)"))
    passed = ran - skipped - len(failed)
    print(f"{ranks} ranks: {passed} pass, {skipped} are for others or skipped, {len(failed)} fail: "
          f"{', '.join(sorted(failed))}", flush=True)
    return failed - KNOWN, said


def main():
    build, status = pathlib.Path(sys.argv[1]).resolve(), 0
    for ranks in map(int, sys.argv[2:]):
        failed, said = one(build, ranks)
        if failed or "Ran " not in said:
            print(said)
            status = 1
    sys.exit(status)


main()
