"""`cmake --install`, then an outside project that finds the package, builds, and trains on two ranks.

python3 install_test.py SOURCE_DIR BUILD_DIR
"""
import pathlib
import sys

from support.program import run, run_cases

SOURCE, BUILD = pathlib.Path(sys.argv[1]), pathlib.Path(sys.argv[2])


def test_outside_project_trains(folder):
    prefix, build = folder + "/prefix", folder + "/build"
    run("cmake", "--install", BUILD, "--prefix", prefix).expect()
    run("cmake", "-S", SOURCE / "tests/consumer", "-B", build, "-G", "Ninja", "-DCMAKE_BUILD_TYPE=Release",
        f"-DCMAKE_PREFIX_PATH={prefix}").expect()
    run("cmake", "--build", build, limit_s=600).expect()

    loss = run(prefix + "/bin/lockstep", "run", "--nproc-per-node", 2, build + "/train").expect(
        out=r"^\[rank 0\] epoch 1: loss ([\d.]+)$").group(1)
    assert float(loss) < 0.8, loss  # of the last batch; 2.3 before training
    run(build + "/train").expect(out=r"^epoch 1: loss [\d.]+$")


if __name__ == "__main__":
    run_cases([test_outside_project_trains])
