"""The programs and files that guides show, as examples/guides has them: what each leads to here.

python3 guides_test.py SOURCE_DIR BUILD_DIR
"""

import json
import os
import pathlib
import re
import shutil
import signal
import subprocess
import sys
import time

from support.program import run, run_cases

SOURCE, BUILD = pathlib.Path(sys.argv[1]).resolve(), pathlib.Path(sys.argv[2]).resolve()
LOCKSTEP = BUILD / "bin/lockstep"
GUIDES = SOURCE / "examples/guides"
PEERS = SOURCE / ".deps/peers/bin/python"


def train(folder, file, *arguments, **variables):
    return run("env", "-C", folder, LOCKSTEP, "train", GUIDES / file, *arguments, **variables)


def settings(**values):
    return [
        word
        for name, value in values.items()
        for word in ("--set", f"{name.replace('__', '.')}={value}")
    ]


def result(folder, name="runs"):
    return json.loads((pathlib.Path(folder) / name / "result.json").read_text())


def test_all_files_are_correct_and_short(folder):
    for file in sorted(GUIDES.glob("*.yaml")):
        done = run(LOCKSTEP, "config", "check", file)
        done.expect()
    lines = [
        line
        for line in (GUIDES / "mnist_mlp.yaml").read_text().splitlines()
        if line and not line.startswith("#")
    ]
    assert len(lines) <= 15, lines


def test_the_mlp_of_784_256_10(folder):
    done = train(
        folder,
        "mnist_mlp.yaml",
        *settings(
            training__epochs=1,
            data__max_samples=6400,
            logging__output_dir="runs",
            checkpoint__save_strategy="no",
        ),
    )
    done.expect()
    found = result(folder)
    assert found["world_size"] == 2 and found["step"] == 50, found
    assert found["metrics"]["accuracy"] > 0.6, found


def test_the_file_of_the_readme(folder):
    """The command that README.md shows, on fewer images."""
    command = re.search(
        r"^lockstep (train examples/mnist\.yaml.*)$", (SOURCE / "README.md").read_text(), re.M
    )[1]
    file = SOURCE / "examples/mnist.yaml"
    lines = [one for one in file.read_text().splitlines() if one and not one.startswith("#")]
    assert len(lines) <= 15, lines
    few = settings(data__max_samples=12800, logging__output_dir=f"{folder}/runs")
    done = run("env", "-C", SOURCE, LOCKSTEP, *command.split(), *few)
    done.expect(out=r"mlp: 203,530 parameters; fashion-mnist: 12,800 samples, evaluated on")
    found = result(folder)
    assert found["world_size"] == 2 and found["epoch"] == 2 and found["step"] == 300, found
    assert found["metrics"]["accuracy"] > 0.7, found


def test_a_line_on_one_process_and_on_many(folder):
    found = []
    for ranks in 1, 4:
        name = f"runs{ranks}"
        train(
            folder,
            "linear_regression.yaml",
            "--nproc-per-node",
            ranks,
            *settings(
                training__batch_size=32 // ranks,
                logging__output_dir=name,
                checkpoint__save_strategy="no",
            ),
        ).expect()
        found.append(result(folder, name))
    assert [one["world_size"] for one in found] == [1, 4]
    assert found[0]["step"] == found[1]["step"], found
    # The order of samples within a step differs, and so the last bits.
    assert abs(found[0]["train_loss"] - found[1]["train_loss"]) < 0.01, found
    assert found[0]["train_loss"] < 0.02, found


def test_the_flat_file_of_run_py(folder):
    few = settings(data__max_samples=2560, checkpoint__save_steps=5)
    first = train(folder, "run.yaml", "--nproc-per-node", 2, *few, *settings(training__max_steps=8))
    first.expect(out=[r"linear"])
    found = result(folder, "runs/run")
    assert found["step"] == 8 and found["resumed_at"] is None, found
    again = train(
        folder, "run.yaml", "--nproc-per-node", 2, *few, *settings(training__max_steps=16)
    )
    again.expect()
    found = result(folder, "runs/run")
    assert found["step"] == 16 and found["resumed_at"] == 8, found
    kept = sorted(
        one.name for one in (pathlib.Path(folder) / "runs/run/checkpoints").glob("step-*")
    )
    assert kept == ["step-00000015", "step-00000016"], kept


def test_learning_rates_grow_as_they_are_told_to(folder):
    for scaling, rate in ("none", 0.1), ("sqrt", 0.2), ("linear", 0.4):
        done = train(
            folder,
            "linear_regression.yaml",
            "--nproc-per-node",
            4,
            *settings(
                lr_scaling=scaling,
                training__max_steps=1,
                logging__logging_steps=1,
                logging__output_dir=scaling,
            ),
        )
        done.expect()
        text = (pathlib.Path(folder) / scaling / "metrics.jsonl").read_text()
        rates = [
            value
            for line in text.splitlines()
            for key, value in json.loads(line).items()
            if key in ("lr", "learning_rate")
        ]
        assert rates and abs(rates[0] - rate) < 1e-9, (scaling, text)


def test_fsdp_keys_work_with_fsdp_and_are_refused_without(folder):
    few = settings(data__max_samples=640, mixed_precision__dtype="no")
    done = train(folder, "fsdp.yaml", *few, *settings(logging__output_dir="divided"))
    done.expect(
        out=[
            r"fsdp: FULL_SHARD in 2 units over 2 ranks, "
            r"with one copy of the parameters on this host$"
        ]
    )
    # The flat file of run.py with accelerate's file beside it, and without: the same losses.
    again = train(
        folder,
        "fsdp.yaml",
        *few,
        *settings(
            logging__output_dir="whole",
            parallel__strategy="fsdp",
            parallel__fsdp__sharding_strategy="NO_SHARD",
        ),
    )
    again.expect(out=[r"fsdp: NO_SHARD in 2 units over 1 rank"])
    assert result(folder, "divided")["train_loss"] == result(folder, "whole")["train_loss"]
    run_py = train(
        folder,
        "run.yaml",
        "--config_file",
        GUIDES / "fsdp_accelerate.yaml",
        *settings(data__max_samples=2560, training__max_steps=4, checkpoint__save_steps=2),
    )
    run_py.expect(out=[r"fsdp: SHARD_GRAD_OP"])
    ignored = pathlib.Path(folder) / "ddp.yaml"
    ignored.write_text(
        (GUIDES / "fsdp.yaml")
        .read_text()
        .replace("distributed_type: FSDP", "distributed_type: MULTI_CPU")
    )
    done = run(LOCKSTEP, "config", "check", ignored)
    done.expect(
        status=2,
        err=[
            r"ddp.yaml:6:3: parallel.fsdp.sharding_strategy: needs parallel.strategy: fsdp",
            r"ddp.yaml:8:3: parallel.fsdp.min_num_params: needs",
        ],
    )


def test_the_ways_to_start_one(folder):
    path = f"{BUILD / 'bin'}:{os.environ['PATH']}"
    done = run(
        "env",
        "-C",
        folder,
        GUIDES / "launch.sh",
        GUIDES / "linear_regression.yaml",
        *settings(training__epochs=1),
        PATH=path,
    )
    done.expect()
    ended = re.findall(r"^.*2 ranks.*$", done.out, re.MULTILINE)
    assert len(ended) >= 4, done


def test_tasks_of_slurm_are_ranks(folder):
    job = {
        "SLURM_JOB_ID": "7",
        "SLURM_STEP_ID": "0",
        "SLURM_STEP_NUM_TASKS": "1",
        "SLURM_STEP_TASKS_PER_NODE": "1",
    }
    assert "srun --kill-on-bad-exit=1 lockstep train" in (GUIDES / "slurm.sh").read_text()
    (pathlib.Path(folder) / "srun").write_text('#!/bin/sh\nshift\nexec "$@"\n')
    (pathlib.Path(folder) / "scontrol").write_text('#!/bin/sh\necho "scontrol $*"\n')
    for name in "srun", "scontrol":
        (pathlib.Path(folder) / name).chmod(0o755)
    path = f"{folder}:{BUILD / 'bin'}:{os.environ['PATH']}"
    done = run(
        "env",
        "-C",
        folder,
        GUIDES / "slurm.sh",
        GUIDES / "linear_regression.yaml",
        *settings(training__epochs=1),
        PATH=path,
        **job,
    )
    done.expect()


def test_files_of_ones_own(folder):
    """Each kind of data that is a file, on two ranks."""
    script = """
import numpy, pathlib, random, torch
from safetensors.torch import save_file
g = numpy.random.default_rng(0)
x = g.normal(size=(256, 4)).astype("float32")
y = (x[:, 0] > 0).astype("int64")
numpy.save("x.npy", x); numpy.save("y.npy", y)
save_file({"inputs": torch.from_numpy(x), "targets": torch.from_numpy(y)}, "xy.safetensors")
rows = [f"{a[0]*100+7},{a[1]},{a[2]},{a[3]},{'yes' if b else 'no'}" for a, b in zip(x, y)]
pathlib.Path("xy.csv").write_text("a,b,c,d,label\\n" + "\\n".join(rows) + "\\nx,1,1,1,no\\n")
"""
    run("env", "-C", folder, PEERS, "-c", script).expect()
    common = (
        "model: linear\noptimizer: {kind: sgd, learning_rate: 0.5}\n"
        "training: {epochs: 8, batch_size: 16, seed: 1, metrics: [accuracy]}\n"
        "logging: {output_dir: runs}\n"
    )
    kinds = {
        "npy": "path: x.npy, targets_path: y.npy",
        "safetensors": "path: xy.safetensors",
        "csv": "path: xy.csv, classification: true, scaling: standard, bad_rows: skip",
    }
    for kind, keys in kinds.items():
        text = (
            common.replace("runs", kind)
            + f"data: {{kind: {kind}, {keys}, validation_fraction: 0.25}}\n"
        )
        (pathlib.Path(folder) / f"{kind}.yaml").write_text(text)
        done = train(folder, pathlib.Path(folder) / f"{kind}.yaml", "--nproc-per-node", 2)
        done.expect()
        found = result(folder, kind)
        assert found["metrics"]["accuracy"] > 0.9, (kind, found)
    again = train(
        folder,
        pathlib.Path(folder) / "csv.yaml",
        "--nproc-per-node",
        1,
        *settings(training__epochs=9, resume_from_checkpoint="latest"),
    )
    again.expect()
    assert result(folder, "csv")["resumed_at"] == 48, result(folder, "csv")


def test_a_sweep(folder):
    done = run(
        "env",
        "-C",
        folder,
        LOCKSTEP,
        "sweep",
        GUIDES / "linear_regression.yaml",
        "--over",
        "optimizer.learning_rate=0.1,1e-6",
        "--over",
        "training.seed=1,2",
        *settings(training__epochs=2, checkpoint__save_strategy="no"),
        OMP_NUM_THREADS=None,
    )
    done.expect(out=[r"^best: run-00[01] \(loss = ", r"^4 of 4 runs succeeded; sweep/sweep.json$"])
    found = json.loads((pathlib.Path(folder) / "sweep/sweep.json").read_text())
    assert [one["exit_status"] for one in found["runs"]] == [0] * 4, found


def test_a_sweep_whose_evaluations_are_not_finite_has_no_best_run(folder):
    for name, value in (("train", 1), ("held_out", "1e30")):
        (pathlib.Path(folder) / f"{name}.csv").write_text("x,y\n" + f"1,{value}\n" * 8)
    (pathlib.Path(folder) / "run.yaml").write_text(
        "model: linear\ntraining: {epochs: 1, batch_size: 4}\ncheckpoint: {save_strategy: 'no'}\n"
        "data: {kind: csv, path: train.csv, validation_path: held_out.csv}\n"
    )
    done = run("env", "-C", folder, LOCKSTEP, "sweep", "run.yaml", "--over", "training.seed=1,2")
    done.expect(1, err=r"^lockstep: \[sweep\] no run has a number loss")


def test_a_sweep_has_a_key_and_a_value_once(folder):
    for over, why in (
        (["training.seed=1", "training.seed=2"], "training.seed is there twice: give all its values in one"),
        (["training.seed=1,1"], "a value is there twice"),
        (["logging.output_dir=a,b"], "each run has a folder of its own, below --out"),
    ):
        words = [word for axis in over for word in ("--over", axis)]
        done = run("env", "-C", folder, LOCKSTEP, "sweep", GUIDES / "linear_regression.yaml", *words)
        done.expect(2, err=r"^lockstep: \[sweep\] --over .*" + why)
        assert not (pathlib.Path(folder) / "sweep").exists()


def test_a_sweep_that_is_interrupted_says_by_what(folder):
    words = ["sweep", GUIDES / "linear_regression.yaml", "--over", "training.seed=1,2", "--jobs", "1"]
    words += settings(training__epochs=1000000, checkpoint__save_strategy="no", training__eval_strategy="no")
    streams = dict(stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    sweep = subprocess.Popen([LOCKSTEP, *words], cwd=folder, **streams)
    try:
        log = pathlib.Path(folder) / "sweep/run-000/log.txt"
        end = time.monotonic() + 120
        while not (log.exists() and "epoch 1/" in log.read_text()):
            assert sweep.poll() is None and time.monotonic() < end, sweep.stderr.read()
            time.sleep(0.05)
        sweep.send_signal(signal.SIGINT)
        _, said = sweep.communicate(timeout=120)
    finally:
        sweep.kill()
    assert sweep.returncode == 128 + signal.SIGINT and "a signal has stopped it" in said, (sweep.returncode, said)
    found = json.loads((pathlib.Path(folder) / "sweep/sweep.json").read_text())
    assert [one["exit_status"] for one in found["runs"]] == [128 + signal.SIGINT, None], found


def test_a_sweep_by_a_metric_that_no_run_has(folder):
    arguments = ["sweep", GUIDES / "linear_regression.yaml", "--metric", "nope", "--over", "training.seed=1,2"]
    done = run("env", "-C", folder, LOCKSTEP, *arguments, *settings(training__epochs=1, checkpoint__save_strategy="no"))
    done.expect(2, err=r"^lockstep: \[sweep\] --metric nope: a run has loss.* and train_loss")


def test_a_study_with_optuna(folder):
    shutil.copy(GUIDES / "mnist_mlp.yaml", pathlib.Path(folder) / "run.yaml")
    done = run(
        "env",
        "-C",
        folder,
        PEERS,
        SOURCE / "examples/optuna_study.py",
        "run.yaml",
        "--trials",
        3,
        "--lockstep",
        LOCKSTEP,
        "--metric",
        "accuracy",
        "--",
        "--nproc-per-node",
        "1",
        *settings(data__max_samples=1280, training__epochs=1),
    )
    done.expect(out=r"best accuracy 0\.\d+ with .*3 of 3 trials completed")
    found = json.loads((pathlib.Path(folder) / "study/study.json").read_text())
    assert found["states"] == ["COMPLETE"] * 3, found


if __name__ == "__main__":
    run_cases(
        [
            test_all_files_are_correct_and_short,
            test_the_mlp_of_784_256_10,
            test_the_file_of_the_readme,
            test_a_line_on_one_process_and_on_many,
            test_the_flat_file_of_run_py,
            test_learning_rates_grow_as_they_are_told_to,
            test_fsdp_keys_work_with_fsdp_and_are_refused_without,
            test_the_ways_to_start_one,
            test_tasks_of_slurm_are_ranks,
            test_files_of_ones_own,
            test_a_sweep,
            test_a_sweep_whose_evaluations_are_not_finite_has_no_best_run,
            test_a_sweep_by_a_metric_that_no_run_has,
            test_a_study_with_optuna,
        ]
    )
