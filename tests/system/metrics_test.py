"""What other programs read of a run, read by them: Prometheus the endpoint, TensorBoard's reader the event files.

The trace is read as JSON.

python3 metrics_test.py SOURCE_DIR BUILD_DIR
"""
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
import urllib.error
import urllib.request

from support.program import free_port

LOCKSTEP = pathlib.Path(sys.argv[2]) / "bin" / "lockstep"
PEERS = pathlib.Path(sys.argv[1]) / ".deps" / "peers" / "bin" / "python"
LIMIT = 120  # seconds until something that should have happened has not

CONFIG = """
model: {{kind: linear}}
data: {{kind: synthetic-regression, samples: {samples}}}
optimizer: {{kind: sgd, learning_rate: {rate}}}
training: {{batch_size: 8, seed: 1, loss: mse, {length}}}
checkpoint: {{save_strategy: no}}
logging: {{output_dir: {folder}/run, {logging}}}
"""

TAGS = """
import json, sys
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
events = EventAccumulator(sys.argv[1])
events.Reload()
print(json.dumps({tag: [[one.step, one.value] for one in events.Scalars(tag)] for tag in events.Tags()["scalars"]}))
"""


def train(folder, length, logging, samples=64, rate=0.01, ranks=2):
    config = folder / "run.yaml"
    config.write_text(CONFIG.format(folder=folder, length=length, logging=logging, samples=samples, rate=rate))
    return [LOCKSTEP, "train", config, "--nproc-per-node", str(ranks)]


def step_lines(folder):
    lines = [json.loads(line) for line in (folder / "run/metrics.jsonl").read_text().splitlines()]
    assert lines[-1]["type"] == "end", lines[-1]
    return [line for line in lines if line["type"] == "step"]


def tensorboard_of(folder):
    command = [PEERS, "-c", TAGS, folder / "run/tensorboard"]
    read = subprocess.run(command, capture_output=True, text=True, check=False, timeout=LIMIT)
    assert read.returncode == 0, read.stderr
    return json.loads(read.stdout)


def test_tensorboard_and_a_trace_of_a_configured_run(folder):
    command = train(folder, "max_steps: 7", "logging_steps: 2, tensorboard: true, trace_steps: [3, 4]")
    subprocess.run(command, capture_output=True, check=True, timeout=LIMIT)
    losses = [[one["step"], one["mean_loss"]] for one in step_lines(folder)]
    assert [step for step, _ in losses] == [2, 4, 6, 7], losses
    tags = tensorboard_of(folder)
    seen = tags["train/loss"]
    assert [step for step, _ in seen] == [2, 4, 6, 7], seen
    assert all(abs(a - b) <= 1e-6 * abs(b) for (_, a), (_, b) in zip(seen, losses)), (seen, losses)
    assert "memory_bytes/rank 1" in tags, list(tags)
    events = json.loads((folder / "run/trace.json").read_text())["traceEvents"]
    for rank in (0, 1):
        own = [one for one in events if one["pid"] == rank and one["ph"] == "X"]
        categories = {one["cat"] for one in own}
        assert {"step", "operator", "bucket", "collective", "wait", "data"} <= categories, categories
        assert {one["name"] for one in own if one["cat"] == "step"} == {"step 3", "step 4"}


def test_a_run_that_begins_again_is_shown_once(folder):
    """Nothing was saved: the second run makes the same steps again, and so does a job that is restarted."""
    subprocess.run(train(folder, "max_steps: 7", "logging_steps: 2, tensorboard: true"), capture_output=True,
                   check=True, timeout=LIMIT)
    (first,) = (folder / "run/tensorboard").iterdir()
    first.rename(first.with_name("events.out.tfevents.1.first.1"))  # it comes before, whatever the clock
    subprocess.run(train(folder, "max_steps: 4", "logging_steps: 2, tensorboard: true"), capture_output=True,
                   check=True, timeout=LIMIT)
    assert [step for step, _ in tensorboard_of(folder)["train/loss"]] == [2, 4]


def test_a_run_shorter_than_an_interval_is_reported(folder):
    logging = f"tensorboard: true, open_metrics_file: {folder}/run.prom"  # logging_steps: 50
    subprocess.run(train(folder, "max_steps: 5", logging), capture_output=True, check=True, timeout=LIMIT)
    (only,) = step_lines(folder)
    assert only["step"] == only["steps"] == 5 and only["samples"] == 5 * 8 * 2, only
    assert len(only["ranks"]["memory_bytes"]) == 2, only
    assert [step for step, _ in tensorboard_of(folder)["train/loss"]] == [5]
    assert 'lockstep_step{run="linear"} 5\n' in (folder / "run.prom").read_text()


def test_losses_are_means_over_samples_everywhere(folder):
    """Nothing is learned, and the second batch of an epoch has one sample: each epoch has the same loss."""
    command = train(folder, "epochs: 3", "logging_steps: 2, tensorboard: true", samples=9, rate=0, ranks=1)
    shown = subprocess.run(command, capture_output=True, text=True, check=True, timeout=LIMIT).stdout
    lines = step_lines(folder)
    mean = lines[0]["mean_loss"]
    assert all(abs(one["mean_loss"] - mean) < 1e-6 * mean for one in lines), lines
    assert any(abs(one["loss"] - mean) > 1e-2 * mean for one in lines), lines
    printed = [float(one) for one in re.findall(r"step \d/6 .* loss ([\d.e+-]+)  ", shown)]
    assert len(printed) == 3 and all(abs(one - mean) < 1e-3 * mean for one in printed), (printed, mean)
    exported = tensorboard_of(folder)["train/loss"]
    assert len(exported) == 3 and all(abs(one - mean) < 1e-6 * mean for _, one in exported), (exported, mean)
    report = [LOCKSTEP, "report", folder / "run"]
    words = subprocess.run(report, capture_output=True, text=True, check=True, timeout=LIMIT).stdout
    assert "The loss did not fall" in words and f"from {mean:.4g} to {mean:.4g}" in words, words


def asked(url):
    """The answer, or None where nobody answers yet."""
    try:
        with urllib.request.urlopen(url, timeout=10) as answer:
            return answer.read().decode()
    except (urllib.error.URLError, ConnectionError, TimeoutError):
        return None


def until(look, process):
    """What `look` finds, which it is asked until there is something; `process` has to live."""
    end = time.monotonic() + LIMIT
    while time.monotonic() < end:
        assert process.poll() is None, f"{process.args} ended with {process.returncode}"
        if (found := look()) is not None:
            return found
        time.sleep(0.05)
    raise AssertionError(f"nothing after {LIMIT} s")


def started_prometheus(folder, target):
    """A Prometheus that scrapes `target`, and its address."""
    (folder / "prometheus.yml").write_text(json.dumps(
        {"global": {"scrape_interval": "500ms", "scrape_timeout": "500ms"},
         "scrape_configs": [{"job_name": "lockstep", "static_configs": [{"targets": [target]}]}]}))
    for attempt in range(5):  # somebody else may have taken the port since
        address = f"127.0.0.1:{free_port()}"
        command = ["prometheus", f"--config.file={folder}/prometheus.yml", f"--web.listen-address={address}",
                   f"--storage.tsdb.path={folder}/data{attempt}"]
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        try:
            until(lambda: asked(f"http://{address}/-/ready"), process)
            return process, address
        except AssertionError:
            process.kill()
            process.wait()
    raise AssertionError("Prometheus does not start")


def test_prometheus_scrapes_the_endpoint(folder):
    with open(folder / "said", "w+") as said:
        logging = "logging_steps: 100, prometheus_address: '127.0.0.1:0'"
        job = subprocess.Popen(train(folder, "max_steps: 1000000000", logging), stdout=said)
        prometheus = None
        try:
            endpoint = re.compile(r"http://(127\.0\.0\.1:\d+)/metrics\n")
            target = until(lambda: endpoint.search((folder / "said").read_text()), job)[1]
            text = until(lambda: asked(f"http://{target}/metrics"), job)
            checked = subprocess.run(["promtool", "check", "metrics"], input=text, text=True, check=False)
            assert checked.returncode == 0, text
            prometheus, address = started_prometheus(folder, target)

            def value_of(metric):
                answer = asked(f"http://{address}/api/v1/query?query={metric}")
                return (json.loads(answer)["data"]["result"] if answer else []) or None

            steps = until(lambda: value_of("lockstep_step%3E0"), prometheus)
            assert steps[0]["metric"]["run"] == "linear" and float(steps[0]["value"][1]) >= 100, steps
            memory = until(lambda: value_of("lockstep_memory_bytes"), prometheus)
            assert {one["metric"]["rank"] for one in memory} == {"0", "1"}
        finally:
            if prometheus is not None:
                prometheus.kill()
                prometheus.wait()
            job.send_signal(signal.SIGTERM)
            job.wait(timeout=LIMIT)


def main():
    if shutil.which("prometheus") is None or not PEERS.exists():
        sys.exit("no prometheus or TensorBoard here: scripts/setup.sh --peers installs them")
    for name, test in list(globals().items()):
        if not name.startswith("test_"):
            continue
        with tempfile.TemporaryDirectory() as folder:
            test(pathlib.Path(folder))
        print(f"{name}: passed")


if __name__ == "__main__":
    os.environ.pop("NO_COLOR", None)
    main()
