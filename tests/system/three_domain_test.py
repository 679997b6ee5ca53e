"""What three_domain does with its flags, in runs of seconds.

python3 three_domain_test.py SOURCE_DIR BUILD_DIR
"""
import json
import pathlib
import re
import sys
import xml.etree.ElementTree

from support.program import run, run_cases

SOURCE, BIN = pathlib.Path(sys.argv[1]).resolve(), pathlib.Path(sys.argv[2]).resolve() / "bin"
SMALL = {"--tasks-per-domain": 6, "--eval-tasks": 2, "--eval-trials": 2, "--iterations": 2, "--prompts": 4,
         "--group-size": 2, "--warm-steps": 2, "--warm-batch": 4, "--lanes": 4, "--max-new-tokens": 8,
         "--max-turns": 3}


def three_domain(ranks, folder, **flags):
    """A small run; flags by name, with None for those that have no value."""
    given = {name: str(value) for name, value in SMALL.items()}
    given |= {f"--{name.replace('_', '-')}": value for name, value in flags.items()}
    words = [word for name, value in given.items() for word in ([name] if value is None else [name, value])]
    return run(BIN / "three_domain", "--num-gpus", ranks, "--output-dir", folder, "--no-cache", *words)


def test_each_flag_is_in_the_page(_):
    flags = set(re.findall(r"--[a-z][a-z0-9-]*", run(BIN / "three_domain", "--help").out)) - {"--help"}
    page = (SOURCE / "docs/three_domain.md").read_text()
    assert len(flags) > 40, flags
    missing = sorted(flag for flag in flags if not re.search(rf"`{flag}\b(?!-)", page))
    assert not missing, missing


def test_a_dry_run_says_what_would_be_done_and_does_nothing(folder):
    done = three_domain(3, folder + "/run", dry_run=None)
    done.expect(out=[r"^  stage_2_retail: 3 tasks to learn from, retail/train/0 to retail/train/2, "
                     r"in 2 iterations of 4 x 2 episodes$",
                     r"^    telecom: 2 tasks, telecom/test/0 to telecom/test/1, 2 episodes of each$",
                     r"^collectives of 3 ranks with 4 lanes, ddp, in this order on each of them:$",
                     r"^  6 iterations, each$",
                     r"^    all_gather_bytes  outcomes +reward, length and end of 8 episodes$",
                     r"^    all_reduce        bucket +the gradient of all lanes, 2 times$",
                     r"^  12 evaluations \(4 of 3 domains\), each$",
                     r"^memory of a rank +total +weights .* reference",
                     r"^--parallel fsdp +[\d.]+ [KMG]iB ",
                     r"^3 ranks on this host have [\d.]+ GiB each$"])
    assert not pathlib.Path(folder, "run").exists()
    # Under a launcher one rank speaks for all of them.
    launched = run(BIN / "lockstep", "run", "--nproc-per-node", 2, BIN / "three_domain", "--dry-run",
                   "--output-dir", folder + "/run")
    launched.expect(out=r"collectives of 2 ranks with 8 lanes")
    assert launched.out.count("curriculum:") == 1, launched
    assert not pathlib.Path(folder, "run").exists()
    three_domain(9, folder + "/run", dry_run=None).expect(2, err=r"--lanes 4 for 9 ranks: each rank needs one")


def test_the_guides_smoke_test_leaves_every_file_in_seconds(folder):
    cache = {"XDG_CACHE_HOME": folder + "/cache"}
    smoke = [BIN / "three_domain", "--num-gpus", 1, "--tasks-per-domain", 2, "--output-dir", folder + "/run"]
    run(*smoke, **cache).expect(out=[r"^--warm-steps 50 \(few tasks\)$", r"^--iterations 3 \(few tasks\)$"])
    written = {path.name for path in pathlib.Path(folder, "run").iterdir()}
    assert written >= {"curriculum.json", "results.json", "metrics.json", "trajectories.jsonl", "metrics.jsonl",
                       "report.html", "analysis_report.md", "learning_curves.svg", "stage_performance.svg",
                       "retention_performance.svg", "transfer_metrics.svg", "checkpoints",
                       "grpo_checkpoints"}, written
    for picture in pathlib.Path(folder, "run").glob("*.svg"):
        words = "".join(xml.etree.ElementTree.parse(picture).getroot().itertext())
        assert "retail" in words or "forgetting" in words, (picture, words)
    assert len(json.loads(pathlib.Path(folder, "run/results.json").read_text())["stages"]) == 3
    longer = run(*smoke[:-1], folder + "/long", "--iterations", 4, "--dry-run", **cache)
    longer.expect(out=r" in 4 iterations of 16 x 8")


def test_a_sweep_does_not_take_runs_with_other_flags_for_its_own(folder):
    small = [word for flag, value in SMALL.items() for word in (flag, value) if flag != "--group-size"]
    words = [sys.executable, SOURCE / "examples/guides/three_domain_sweep.py", BIN / "three_domain", folder + "/sweep",
             "--num-gpus", 1, "--iterations", 1, "--order", "airline,retail", "--joint", "--quiet", *small]
    cache = {"XDG_CACHE_HOME": folder + "/cache"}
    done = run(*words, limit_s=600, **cache)
    done.expect(out=[r"^setting +airline +retail +average +when learnt$", r"^no GRPO +0\.\d{3} "])
    again = run(*words, "--seed", 7, **cache)
    again.expect(1, err=[r"sweep/baseline has another run; here: --seed 7", r"baseline: .* ended with status 2"])


def test_a_rank_of_mpirun_starts_none(folder):
    rank = {"OMPI_COMM_WORLD_SIZE": "3", "OMPI_COMM_WORLD_LOCAL_SIZE": "3"}
    says = lambda number: run(BIN / "three_domain", "--dry-run", "--output-dir", folder + "/run",
                              OMPI_COMM_WORLD_RANK=str(number), OMPI_COMM_WORLD_LOCAL_RANK=str(number), **rank)
    says(0).expect(out=r"^collectives of 3 ranks with 8 lanes")
    assert says(1).expect() is None and not says(1).out


def test_a_ramp_begins_with_easy_tasks(folder):
    three_domain(1, folder + "/run", ramp="1", order="airline", quiet=None).expect()
    learnt = [episode for line in pathlib.Path(folder, "run/trajectories.jsonl").read_text().splitlines()
              if (episode := json.loads(line))["phase"] == "learn"]
    easy = {(episode["iteration"], episode["id"].endswith("@1")) for episode in learnt}
    assert easy == {(0, True), (1, False)}, easy
    # Who is served at level 1 says which record it is about.
    assert all(re.search(r", \d{3}\.$", episode["messages"][0]["content"])
               for episode in learnt if episode["iteration"] == 0)
    three_domain(1, folder + "/run", order="airline", resume=None).expect(2, err=r"has another run; here: --ramp 0")
    three_domain(1, folder + "/no", ramp="1", difficulty="1").expect(
        2, err=r"--ramp 1 needs the embedded domains with --difficulty 2 or 3")


def test_the_checkpoint_of_the_last_stage_is_written_again_where_it_is_missing(folder):
    for flags in {}, {"parallel": "fsdp", "export_hf": None}:
        output = pathlib.Path(folder, "fsdp" if flags else "ddp")
        flags |= {"order": "airline"}
        three_domain(2, output, **flags).expect()
        stage, kept = output / "grpo_checkpoints/stage_1_airline", output / "kept"
        stage.rename(kept)
        three_domain(2, output, resume=None, **flags).expect()
        run(BIN / "lockstep", "diff", kept, stage).expect()
        if flags != {"order": "airline"}:
            (stage / "huggingface/tokenizer.json").unlink()
            three_domain(2, output, resume=None, **flags).expect()
            assert (stage / "huggingface/tokenizer.json").exists()


def test_an_empty_model_is_refused(folder):
    for words in [["--model", ""], ["--model="]]:
        refused = run(BIN / "three_domain", "--dry-run", "--output-dir", folder + "/run", *words)
        refused.expect(2, err=r"--model is empty: give a folder or a name, or leave it out")


def test_a_missing_value_does_not_take_the_next_option(folder):
    folder = pathlib.Path(folder)
    says = lambda *words: run("env", "-C", folder, BIN / "three_domain", "--num-gpus", 1, "--dry-run", *words)
    says("--output-dir=", "--beta=0.5").expect(2, err=r"--output-dir= has no value: give one, or leave it out")
    says("--output-dir", "--beta=0.5").expect(2, err=r"--output-dir has no value: --beta=0.5 follows it")
    says("--beta", "").expect(2, err=r"--beta has an empty value")
    says("--output-dir=a=", "--beta=0.5").expect()
    file = folder / "f.yaml"
    file.write_text('program: three_domain\noutput_dir: ""\nbeta: 0.5\norder: []\n')
    says("--config", file).expect(2, err=[r"f.yaml:2: the value of output_dir is empty: give one, or leave the key",
                                          r"f.yaml:4: the value of order is empty"])
    file.write_text("program: three_domain\nnum_gpus: 1\n")
    lockstep = BIN / "lockstep"
    refused = run("env", "-C", folder, lockstep, "train", file, "--set", "output_dir=", "--set", "beta=0.5")
    assert refused.status != 0 and "--output-dir= has no value" in refused.err, refused
    assert [path.name for path in folder.iterdir()] == ["f.yaml"], list(folder.iterdir())


def test_a_section_of_a_runs_file_has_the_flags(folder):
    file = pathlib.Path(folder, "run.yaml")
    file.write_text("""three_domain:
  beta: 0.05
  order: [airline, retail]
  iterations: 2
  dry_run: true
logging: {output_dir: OUT}
checkpoint: {save_steps: 3}
launch: {nproc_per_node: 2}
learning_rate: 1e-3
max_grad_norm: 0.5
gradient_accumulation_steps: 2
seed: 7
""".replace("OUT", folder + "/out"))
    said = [r"collectives of 2 ranks with 8 lanes", r"in 2 iterations of 32 x 8 episodes$", r"  after 3 iterations and"]
    run(BIN / "three_domain", "--config", file).expect(out=said)
    run(BIN / "lockstep", "train", file).expect(out=said)
    run(BIN / "lockstep", "train", file, "--set", "three_domain.iterations=4", "--set", "checkpoint.save_steps=5",
        "--set", "three_domain.num_gpus=3").expect(
        out=[r"collectives of 3 ranks", r"in 4 iterations of 32 x 8", r"  after 5 iterations"])
    for line, problem in {
            "  betta: 1": r"run.yaml:2: unknown key three_domain.betta; the nearest is beta",
            "  beta: 1\nbeta: 2": r"run.yaml:3: beta is there twice, first in line 2",
            "  beta: 1\nlogging:\n  tensorboard: true":
                r"run.yaml:4: unknown key logging.tensorboard; of this section",
            "  iterations: many": r"run.yaml:2: three_domain.iterations: .*--iterations.*many",
            "  beta: 1\ncheckpoint: {resume: runs/old}":
                r"run.yaml:3: checkpoint.resume: --resume: 'runs/old' is none of true, false and latest: a run is",
            "  resume: 2nd": r"run.yaml:2: three_domain.resume: --resume: '2nd' is none of true, false and latest",
            "  beta: 1\nlaunch: {nproc_per_node: 3}\nnum_gpus: 2":
                r"launch.nproc_per_node is 3, and num_gpus 2"}.items():
        file.write_text(f"three_domain:\n{line}\n")
        run(BIN / "three_domain", "--config", file, "--dry-run").expect(2, err=problem)


def test_a_section_launch_says_how_ranks_are_started(folder):
    file = pathlib.Path(folder, "run.yaml")
    small = json.dumps({name[2:].replace("-", "_"): value for name, value in SMALL.items()} | {"order": "airline"})
    write = lambda launch: file.write_text(f"three_domain: {small}\nlaunch: {{{launch}}}\n")
    says = lambda *words: run(BIN / "three_domain", "--config", file, "--output-dir", folder + "/run", *words)
    write("nproc_per_node: 3, node_rank: -1, rdzv_id: '', threads_per_rank: 1")
    says("--dry-run").expect(out=r"^collectives of 3 ranks")
    says("--dry-run", "--num-gpus", 2).expect(out=r"^collectives of 2 ranks")
    run(BIN / "lockstep", "train", file, "--set", "dry_run=true", "--set", "checkpoint.resume=latest").expect(
        out=r"collectives of 3 ranks")
    write("nproc_per_node: 2, nnodes: 2")
    says("--dry-run").expect(out=r"^collectives of 4 ranks")
    write("nproc_per_node: auto")
    says("--dry-run").expect(2, err=r"launch.nproc_per_node and launch.nnodes have to be numbers")
    says("--config", file).expect(2, err=r"one --config with a section launch is all")
    # Flags go before it, and are the run's.
    write(f"nproc_per_node: 3, threads_per_rank: 1, log_dir: {folder}/logs")
    done = says("--num-gpus", 2, "--no-cache", "--gradient-accumulation-steps=2", "--resume=latest", "--log_eval",
                "all")
    done.expect(out=[r"three_domain: 2 ranks", r"^\[rank 0\] --prompts 8 \(command line\)$",
                     r"--log-eval-all true \(command line\)$"])
    assert "given 2 times" not in done.err, done.err
    assert list(pathlib.Path(folder, "logs").iterdir())
    write("nproc_per_node: 3, max_restart: 1")
    says().expect(2, err=r"run.yaml:2:\d+: unknown key 'max_restart'")


def test_trajectories_have_tokens_where_they_are_asked_for(folder):
    three_domain(2, folder + "/run", order="airline", log_tokens=None, log_eval="all").expect()
    episodes = [json.loads(line) for line in pathlib.Path(folder, "run/trajectories.jsonl").read_text().splitlines()]
    assert all(sum(one["mask"]) == one["tokens"] and len(one["mask"]) == len(one["token_ids"]) for one in episodes)
    assert {one["sample"] for one in episodes if one["phase"] == "eval"} == {0, 1}
    groups = {}
    for one in episodes:
        if one["phase"] == "learn":
            groups.setdefault((one["iteration"], one["id"]), []).append(one)
    assert groups and all(abs(sum(one["advantage"] for one in group)) < 1e-12 for group in groups.values()), groups


def test_a_model_that_no_rank_has_room_for_is_refused_before_it_is_read(folder):
    model = pathlib.Path(folder, "model")
    model.mkdir()
    sizes = {"model_type": "qwen3", "vocab_size": 500, "num_hidden_layers": 36, "intermediate_size": 100,
             "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 40960,
             "tie_word_embeddings": True, "hidden_size": 1 << 30}
    (model / "config.json").write_text(json.dumps(sizes))
    refused = run(BIN / "three_domain", "--num-gpus", 1, "--model", model, "--output-dir", folder + "/run")
    refused.expect(2, out=r"^memory of a rank +total +weights",
                   err=r"ddp: weights, gradients, optimizer and reference take [\d.]+ TiB of each rank.*--force")


def test_numbers_and_names_that_are_wrong_are_named(folder):
    says = lambda *words: run(BIN / "three_domain", "--dry-run", "--output-dir", folder + "/run", *words)
    for name in "--seed", "--iterations":
        says(name, "99999999999999999999").expect(2, err=rf"{name} 99999999999999999999 is out of range")
    for value in "inf", "1e400":
        says("--learning-rate", value).expect(2, err=r"--learning-rate inf has to be finite")
    says("--resume=runs/old").expect(2, err=r"--resume: 'runs/old' is none of true, false and latest")
    says("--num-gpuss", 2).expect(2, err=r"unknown option --num-gpuss; the nearest is --num-gpus ")


if __name__ == "__main__":
    run_cases([case for name, case in list(globals().items()) if name.startswith("test_")])
