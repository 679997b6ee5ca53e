"""A study with Optuna: each trial is a run of `lockstep train`, with --set in and result.json and the exit status out.

    .deps/peers/bin/python examples/optuna_study.py examples/guides/mnist_mlp.yaml --trials 20

Trials that fail are marked as failed, and the study continues. Flags after -- go to every trial: -- --nproc-per-node 2.
"""
import argparse
import json
import pathlib
import subprocess
import sys

import optuna

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("file", help="what a run does but for what is searched")
parser.add_argument("--trials", type=int, default=20)
parser.add_argument("--out", default="study", help="a folder for each trial, and study.json")
parser.add_argument("--metric", default="loss", help="of the last evaluation, or train_loss")
parser.add_argument("--lockstep", default="build/release/bin/lockstep")
parser.add_argument("--seed", type=int, default=0)
words = sys.argv[1:]
end = words.index("--") if "--" in words else len(words)
arguments, flags = parser.parse_args(words[:end]), words[end + 1:]
out = pathlib.Path(arguments.out)


def objective(trial):
    chosen = {
        "optimizer.learning_rate": trial.suggest_float("learning_rate", 1e-4, 1e-1, log=True),
        "model.hidden": trial.suggest_categorical("hidden", ["[64]", "[256]", "[256, 64]"]),
    }
    folder = out / f"trial-{trial.number:03}"
    folder.mkdir(parents=True)
    command = [arguments.lockstep, "train", arguments.file, *flags,
               "--set", f"logging.output_dir={json.dumps(str(folder))}", "--set", "checkpoint.save_strategy=no"]
    for key, value in chosen.items():
        command += ["--set", f"{key}={value}"]
    with open(folder / "log.txt", "w") as log:
        subprocess.run(command, check=True, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT)
    result = json.loads((folder / "result.json").read_text())
    trial.set_user_attr("folder", str(folder))
    return result["metrics"].get(arguments.metric, result.get(arguments.metric))


lower = arguments.metric in ("loss", "train_loss", "perplexity", "mse", "rmse", "mae")
study = optuna.create_study(direction="minimize" if lower else "maximize",
                            sampler=optuna.samplers.TPESampler(seed=arguments.seed))
study.optimize(objective, n_trials=arguments.trials, catch=(subprocess.CalledProcessError,))
states = [trial.state.name for trial in study.trials]
summary = {"best": study.best_params, "value": study.best_value, "states": states}
(out / "study.json").write_text(json.dumps(summary, indent=1))
print(f"best {arguments.metric} {study.best_value:.4f} with {study.best_params}; "
      f"{states.count('COMPLETE')} of {len(states)} trials completed")
