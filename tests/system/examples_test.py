"""Each example, alone and under the launcher: real outcomes, and what bad input gives.

python3 examples_test.py SOURCE_DIR BUILD_DIR
"""
import gzip
import json
import os
import pathlib
import re
import shutil
import signal
import subprocess
import sys

from support.program import run, run_cases

BIN = pathlib.Path(sys.argv[2]) / "bin"
DATA = pathlib.Path("/usr/share/datasets/fashion-mnist")
IMAGES, LABELS = "train-images-idx3-ubyte.gz", "train-labels-idx1-ubyte.gz"


def launch(ranks, program, *arguments, **variables):
    return run(BIN / "lockstep", "run", "--nproc-per-node", ranks, BIN / program, *arguments, **variables)


def preempt(folder, signal, who):
    """Sends the signal to a running training; returns the step after which it ended, and the one at which it began."""
    command = [BIN / "lockstep", "run", "--nproc-per-node", "2", BIN / "resume", "--directory", folder + "/runs"]
    command += ["--steps", "1000000000", "--save-every", "50"]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    job = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)
    begun = re.match(r"\[rank 0\] \w+ at step (\d+)", job.stdout.readline())
    who(job, signal)
    out, _ = job.communicate(timeout=180)
    assert job.returncode == 75, (job.returncode, out)
    return int(re.search(r"saved and leaves after step (\d+)", out).group(1)), int(begun.group(1))


def test_a_preempted_training_leaves_together_and_resumes(folder):
    def launcher(job, number):
        job.send_signal(number)

    def one_rank(job, number):
        ranks = pathlib.Path(f"/proc/{job.pid}/task/{job.pid}/children").read_text().split()
        names = {pid: pathlib.Path(f"/proc/{pid}/environ").read_bytes().split(b"\0") for pid in ranks}
        os.kill(next(int(pid) for pid, words in names.items() if b"RANK=1" in words), number)

    steps = 0
    for number, who in ((signal.SIGUSR1, launcher), (signal.SIGUSR1, one_rank), (signal.SIGTERM, launcher)):
        left, begun = preempt(folder, number, who)
        assert begun == steps and left > steps, (begun, steps, left)
        steps = left
    done = launch(2, "resume", "--directory", folder + "/runs", "--steps", steps + 10)
    done.expect(out=[rf"resumes at step {steps}$", rf"trained after step {steps + 10}, "])
    alone = run(BIN / "resume", "--directory", folder + "/runs", "--steps", steps + 20)
    alone.expect(out=[rf"resumes at step {steps + 10}$", rf"trained after step {steps + 20}, "])


def make_corpus(folder):
    """A tokenizer with a vocabulary of 300, and this project's pages as its tokens, in `folder`/corpus."""
    pages = pathlib.Path(sys.argv[1]) / "docs"
    made = run(BIN / "lockstep", "tokenize", pages, "--to", folder + "/corpus", "--vocabulary", 300)
    made.expect(out=[r"documents, \d+ bytes, \d+ tokens of 300$"])


def test_a_language_model_resumes_to_the_same_bits(folder):
    make_corpus(folder)
    small = ["--corpus", folder + "/corpus", "--steps", 6, "--save-every", 3, "--batch-size", 2]
    small += ["--sequence-length", 16, "--layers", 2, "--hidden", 16, "--heads", 2, "--sample-tokens", 8]
    whole = launch(2, "gpt", *small, "--directory", folder + "/a")
    whole.expect(out=[r"starts at step 0", r"step 3: loss", r"step 6: loss [\d.]+, perplexity"])
    shutil.copytree(folder + "/a/step-00000003", folder + "/b/step-00000003")
    again = launch(2, "gpt", *small, "--directory", folder + "/b")
    again.expect(out=[r"resumes at step 3"])
    last = [re.search(r"step 6: loss .*", result.out).group(0) for result in (whole, again)]
    assert last[0] == last[1], last
    for name in ("model.safetensors", "config.json", "generation_config.json", "tokenizer.json"):
        files = [pathlib.Path(folder, run_of, "model", name).read_bytes() for run_of in "ab"]
        assert files[0] == files[1], name


def test_a_language_model_as_a_file(folder):
    make_corpus(folder)
    example = pathlib.Path(sys.argv[1]).resolve() / "examples/gpt.yaml"
    small = {
        "model.layers": 1,
        "model.hidden": 16,
        "model.heads": 2,
        "data.sequence_length": 16,
        "data.max_samples": 400,
        "data.validation_fraction": 0.001,
        "training.max_steps": 4,
        "training.eval_steps": 2,
        "training.batch_size": 2,
        "training.sample.max_new_tokens": 8,
        "logging.logging_steps": 2,
    }
    few = [word for key, value in small.items() for word in ("--set", f"{key}={value}")]
    done = run("env", "-C", folder, BIN / "lockstep", "train", example, "--nproc-per-node", 2, *few)
    done.expect(out=[r"evaluated after step 2:.* perplexity [\d.]+$", r"sample after step 4: The "])
    page = pathlib.Path(folder, "runs/gpt/report.html")
    assert "sample" in page.read_text()  # the run has made it
    page.unlink()
    page = run("env", "-C", folder, BIN / "lockstep", "report", "runs/gpt")
    page.expect()
    assert "sample" in pathlib.Path(folder, "runs/gpt/report.html").read_text()


def test_three_domains_as_a_file(folder):
    example = pathlib.Path(sys.argv[1]).resolve() / "examples/three_domain.yaml"
    small = {
        "tasks_per_domain": 6,
        "eval_tasks": 2,
        "eval_trials": 2,
        "iterations": 1,
        "prompts": 2,
        "group_size": 2,
        "warm_steps": 2,
        "warm_batch": 4,
        "lanes": 4,
        "output_dir": "run",
        "no_cache": "true",
    }
    few = [word for key, value in small.items() for word in ("--set", f"{key}={value}")]
    done = run("env", "-C", folder, BIN / "lockstep", "train", example, *few)
    done.expect(out=[r"three_domain: .*2 ranks",
                     r"mean reward after +airline +retail +telecom",
                     r"an oracle +1.000 +1.000 +1.000",
                     r"summary +this run +guides' own",
                     r"^.*average accuracy +[\d.]+ +-$",
                     r"pass\^2 ",
                     r"parameters [0-9a-f]{16}"])
    # By itself it starts as many ranks as it is told to, and leaves the same bits.
    flags = [f"--{key.replace('_', '-')}={value}" for key, value in (small | {"output_dir": "again"}).items()]
    again = run("env", "-C", folder, BIN / "three_domain", "--num-gpus", 3, "--export-hf", *flags)
    sums = [re.search(r"parameters [0-9a-f]{16}", result.out).group(0) for result in (done, again)]
    assert sums[0] == sums[1], sums
    for name in ("metrics.json", "trajectories.jsonl"):
        assert pathlib.Path(folder, "run", name).read_bytes() == pathlib.Path(folder, "again", name).read_bytes(), name
    results = json.loads(pathlib.Path(folder, "run/results.json").read_text())
    assert results["config"]["iterations"] == "1" and results["config"]["skill"] == "0.4", results["config"]
    origins = json.loads(pathlib.Path(folder, "again/results.json").read_text())["origins"]
    assert origins.keys() == results["config"].keys(), origins
    assert (origins["iterations"], origins["skill"]) == ("command line", "preset"), origins
    stage = results["stages"][1]
    figures = {"selection", "invocation", "output_usage", "success"}
    assert stage["tool_performance"]["get_order"].keys() == figures, stage
    assert stage["new_tool_success_rate"] == stage["eval_reward"], stage  # each of retail's tools is new
    assert "| `get_order` |" in pathlib.Path(folder, "run/analysis_report.md").read_text()
    log = folder + "/run/trajectories.jsonl"
    done = run(BIN / "lockstep", "inspect", log)
    done.expect(out=[r": 36 episodes$", r"learning in stage +3 telecom +4 episodes +mean reward"])
    run(BIN / "lockstep", "inspect", log, "--episode", 1).expect(out=[r"^airline/test/0: reward [\d.]+", r"^ +user  "])
    run(BIN / "lockstep", "inspect", log, "--episode", 37).expect(2, err="has 36 episodes")
    run(BIN / "lockstep", "inspect", log, "--json").expect(2, err="--json and --only are for checkpoints")
    done = run(BIN / "lockstep", "inspect", folder + "/run/checkpoints", "--episode", 1)
    done.expect(2, err="--episode is for a trajectories.jsonl")
    run(BIN / "lockstep", "report", folder + "/run").expect()
    assert "What was learnt, and what was forgotten" in pathlib.Path(folder, "run/report.html").read_text()
    wrong = pathlib.Path(folder, "wrong.yaml")
    wrong.write_text("program: three_domain\nbetta: 1\norder: {a: 1}\n")
    done = run(BIN / "three_domain", "--config", wrong)
    done.expect(2, err=r"wrong.yaml:2: unknown key betta; the nearest is beta\n.*wrong.yaml:3: the value of order")
    wrong.write_text("program: three_domain\nlearning_rate: 1e-3\nbeta: 0\nlearning-rate: 1e-4\n")
    done = run(BIN / "three_domain", "--config", wrong)
    done.expect(2, err=r"wrong.yaml:4: learning-rate is there twice, first in line 2")
    run(BIN / "three_domain", "--num-gpus", 0).expect(2, err=r"error: --num-gpus: has to be a number above 0, not 0")
    run(BIN / "three_domain", "--num-gpus", 9).expect(2, err=r"^error: \[three_domain\] --lanes 8 for 9 ranks")
    # Ranks know what was read once.
    for start in (f"{BIN}/three_domain --num-gpus 2 --config /dev/stdin", f"{BIN}/lockstep train /dev/stdin"):
        text = "program: three_domain\\noutput_dir: /proc/nowhere\\n"
        run("bash", "-c", f"printf '{text}' | {start}").expect(2, err="--output-dir /proc/nowhere")
    with_a_model(folder, folder + "/again/grpo_checkpoints/stage_1_airline/huggingface")


def with_a_model(folder, model):
    flags = ["--order", "airline", "--tasks-per-domain", 4, "--eval-trials", 1, "--prompts", 2, "--iterations", 1,
             "--context", 384, "--max-new-tokens", 8, "--chat-format", "compact", "--model", model]
    fits = run(BIN / "three_domain", "--num-gpus", 2, *flags, "--output-dir", folder + "/fits")
    fits.expect(out=r"three_domain: .*2 ranks .*, ddp, fp32$")
    divided = run(BIN / "three_domain", "--num-gpus", 2, *flags, "--parallel", "fsdp", "--precision", "bf16",
                  "--output-dir", folder + "/divided")
    divided.expect(out=r"three_domain: .*2 ranks .*, fsdp, bf16$")


def check_line(match):
    w, b = float(match.group(1)), float(match.group(2))
    assert abs(w - 2) < 0.05 and abs(b - 3) < 0.05, match.group(0)


def test_linear_regression_alone_finds_the_line(_):
    check_line(run(BIN / "linear_regression").expect(out=r"^1 rank .*loss 0\.01.*w = ([\d.]+), b = ([\d.]+)$"))


def test_linear_regression_compares_one_process_with_two(_):
    done = launch(2, "linear_regression", "--compare")
    for ranks in ("1 rank ", "2 ranks "):
        check_line(done.expect(out=rf"^\[rank 0\] {ranks}.* w = ([\d.]+), b = ([\d.]+)$"))
    done.expect(out=r"^\[rank 0\] speed-up on 2 ranks: [\d.]+x$")


def test_linear_regression_scales_the_learning_rate(_):
    # One epoch at a low rate is far from the line: the larger the rate, the smaller the loss.
    loss = {scaling: float(launch(2, "linear_regression", "--epochs", 1, "--lr", 0.002, "--lr-scaling", scaling)
                           .expect(out=r"loss ([\d.]+)").group(1)) for scaling in ("none", "sqrt", "linear")}
    assert loss["linear"] < loss["sqrt"] < loss["none"], loss
    run(BIN / "linear_regression", "--lr-scaling", "cubic").expect(2, err=r"error: --lr-scaling: cubic not in \{none")


def test_a_wrong_number_is_told_what_it_may_be(_):
    done = run(BIN / "mnist", "--seed", "-1")
    done.expect(2, err=r"error: --seed: has to be a number, 0 or above, not -1 \(see --help\)$")
    done = run(BIN / "linear_regression", "--epochs", "x")
    done.expect(2, err=r"error: --epochs: has to be a number, 0 or above, not x")


def check_mnist(done, figures):
    done.expect(out=[r"step \d+/\d+  loss", r"test accuracy .* of 10000 images"])
    line = json.loads(pathlib.Path(figures).read_text())
    assert line["counted"] == 10000 and line["accuracy"] >= 0.85, line
    assert len(line["peak_rss_mb"]) == line["world"] and min(line["peak_rss_mb"]) > 50, line
    assert line["samples_per_s"] > 0 and line["step_us"] > 0 and line["startup_s"] > 0, line
    return line


def test_mnist_alone_learns(folder):
    done = run(BIN / "mnist", "--epochs", 1, "--json", folder + "/figures.json")
    assert check_mnist(done, folder + "/figures.json")["steps"] == 938


def test_mnist_on_two_ranks_learns(folder):
    done = launch(2, "mnist", "--json", folder + "/figures.json")
    assert check_mnist(done, folder + "/figures.json")["steps"] == 938
    done.expect(out=r"batch 64 x 2 ranks = 128 images a step, 469 steps an epoch")


def test_mnist_counts_every_test_image_once_on_three_ranks(_):
    launch(3, "mnist", "--steps", 2).expect(out=r"of 10000 images")


def test_mnist_repeats_itself(_):
    first, second = (launch(2, "mnist", "--steps", 40).expect(out=r"test accuracy .* final loss [\d.]+").group(0)
                     for _ in range(2))
    assert first == second, (first, second)


def test_tasks_gives_the_remainder_as_asked(_):
    expected = {"first": (4, 3, 3), "last": (3, 3, 4), "spread": (3, 3, 4)}
    for remainder, sizes in expected.items():
        rows = [rf"rank {r}: {size} tasks" for r, size in enumerate(sizes)]
        launch(3, "tasks", "--remainder", remainder).expect(out=rows + ["10 tasks, 9592 primes below 100000$"])
    run(BIN / "tasks").expect(out=r"^10 tasks, 9592 primes below 100000$")
    launch(3, "tasks", "--tasks", 2).expect(out=[r"rank \d: 0 tasks", "2 tasks, 2262 primes below 20000$"])


def test_collectives_tour(_):
    run(BIN / "collectives").expect(out=r"solo.*: done$")
    launch(3, "collectives").expect(out=[r"all_reduce +rank 0: 6 60$", r"all_gather +rank 0: 1 10 2 20 3 30$",
                                         r"all_to_all +rank 0: 0 100 200$", r"3 ranks .*: done$"])


def broken(folder, damage):
    """A copy of the data whose training images went through `damage`."""
    for file in DATA.iterdir():
        (pathlib.Path(folder) / file.name).symlink_to(file)
    target = pathlib.Path(folder) / IMAGES
    target.unlink()
    content = damage((DATA / IMAGES).read_bytes())
    if content is not None:
        target.write_bytes(content)
    return folder


def check_refused(folder, words):
    errors = [rf"^\[rank {rank}\] error on rank {rank}: .*{words}" for rank in (0, 1)]
    launch(2, "mnist", "--data", folder).expect(1, err=errors)


def test_the_trainers_program_learns(_):
    program = (BIN / "../../../examples/train_mnist.cpp").resolve().read_text()
    assert len([line for line in program.splitlines() if line and not line.startswith("//")]) <= 40, program
    done = launch(2, "train_mnist")
    accuracy = float(done.expect(out=r"^\[rank 0\] test accuracy (0\.\d+)$").group(1))
    assert accuracy > 0.8, accuracy


def test_the_trainers_file_learns(folder):
    file = pathlib.Path(sys.argv[1]).resolve() / "examples/mnist.yaml"
    assert len([line for line in file.read_text().splitlines() if line and not line.startswith("#")]) <= 15
    done = run("env", "-C", folder, BIN.resolve() / "lockstep", "train", file, "--nproc-per-node", 2,
               "--set", "training.epochs=1", OMP_NUM_THREADS="1")
    accuracy = float(done.expect(out=r"^\[rank 0\] finished after step 469: .*accuracy (0\.\d+)").group(1))
    assert accuracy > 0.8, accuracy


def test_data_folder_missing(folder):
    check_refused(folder + "/nowhere", "no such folder.*dataset-fashion-mnist")


def test_data_file_missing(folder):
    check_refused(broken(folder, lambda _: None), IMAGES)


def test_data_file_truncated(folder):
    check_refused(broken(folder, lambda content: content[:len(content) // 2]), IMAGES)


def test_data_file_is_no_gzip(folder):
    check_refused(broken(folder, lambda _: b"<html>404 not found</html>"), IMAGES)


def test_data_file_has_labels_where_images_belong(folder):
    check_refused(broken(folder, lambda _: (DATA / LABELS).read_bytes()), IMAGES)


def test_data_file_is_cut_inside(folder):
    check_refused(broken(folder, lambda content: gzip.compress(gzip.decompress(content)[:784 * 100], 1)), IMAGES)


def test_only_a_near_option_is_named_for_an_unknown_one(_):
    run(BIN / "tasks", "--hlep").expect(2, err=r"unknown option --hlep; the nearest is --help \(see --help\)$")
    run(BIN / "tasks", "--episodes", 3).expect(2, err=r"unknown option --episodes \(see --help\)$")


def test_batches_that_cannot_be_are_refused(_):
    launch(2, "mnist", "--batch-size", 0).expect(2, err=r"error on rank 0: --batch-size: has to be a number above 0")
    done = launch(2, "mnist", "--batch-size", 40000)
    done.expect(2, err=r"--batch-size 40000 on 2 ranks is more than the 60000 images")
    run(BIN / "mnist", "--batch", 64).expect(2, err=r"error: .*--batch")
    done = launch(2, "linear_regression", "--batch-size", 5001)
    done.expect(2, err=r"--batch-size 5001 on 2 ranks is more than the 10000 samples")


def test_output_that_is_lost_is_an_error(_):
    for words, why in ("collectives", ""), ("mnist --steps 1", ""), ("gpt --help", "No space left on device"):
        done = run("sh", "-c", f"{BIN}/{words} > /dev/full")
        done.expect(1, err=f"^error: stdout cannot be written: {why}.*: make room")


def test_the_trainers_program_says_its_usage(_):
    run(BIN / "train_mnist", "--help").expect(out=r"^usage: train_mnist \[FOLDER\]$")
    run(BIN / "train_mnist", "--epochs", 1).expect(2, err=r"^usage: train_mnist \[FOLDER\]$")


def test_contradicting_environment(_):
    run(BIN / "mnist", RANK="1").expect(2, err="RANK is set, but WORLD_SIZE is not")
    run(BIN / "mnist", RANK="2", WORLD_SIZE="2").expect(2, err="RANK=2 with WORLD_SIZE=2")
    run(BIN / "mnist", RANK="0", WORLD_SIZE="2").expect(2, err="WORLD_SIZE=2 needs MASTER_ADDR")


def test_unwritable_figures_end_the_job(folder):
    done = launch(2, "mnist", "--steps", 1, "--json", folder + "/nowhere/x.json")
    done.expect(1, err="cannot write .*nowhere/x.json")


if __name__ == "__main__":
    run_cases([case for name, case in list(globals().items()) if name.startswith("test_")])
