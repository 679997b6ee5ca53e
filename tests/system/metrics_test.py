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
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request

LOCKSTEP = pathlib.Path(sys.argv[2]) / "bin" / "lockstep"
PEERS = pathlib.Path(sys.argv[1]) / ".deps" / "peers" / "bin" / "python"
LIMIT = 120  # seconds until something that should have happened has not

CONFIG = """
model: {{kind: linear}}
data: {{kind: synthetic-regression, samples: 64}}
optimizer: {{kind: sgd, learning_rate: 0.01}}
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


def train(folder, length, logging):
    config = folder / "run.yaml"
    config.write_text(CONFIG.format(folder=folder, length=length, logging=logging))
    return [LOCKSTEP, "train", config, "--nproc-per-node", "2"]


def test_tensorboard_and_a_trace_of_a_configured_run(folder):
    command = train(folder, "max_steps: 6", "logging_steps: 2, tensorboard: true, trace_steps: [3, 4]")
    subprocess.run(command, capture_output=True, check=True, timeout=LIMIT)
    reports = [json.loads(line) for line in (folder / "run/metrics.jsonl").read_text().splitlines()]
    losses = [[one["step"], one["loss"]] for one in reports if one["type"] == "step"]
    assert [step for step, _ in losses] == [2, 4, 6], losses
    command = [PEERS, "-c", TAGS, folder / "run/tensorboard"]
    read = subprocess.run(command, capture_output=True, text=True, check=False, timeout=LIMIT)
    assert read.returncode == 0, read.stderr
    tags = json.loads(read.stdout)
    seen = tags["train/loss"]
    assert [step for step, _ in seen] == [2, 4, 6], seen
    assert all(abs(a - b) <= 1e-6 * abs(b) for (_, a), (_, b) in zip(seen, losses)), (seen, losses)
    assert "memory_bytes/rank 1" in tags, list(tags)
    events = json.loads((folder / "run/trace.json").read_text())["traceEvents"]
    for rank in (0, 1):
        own = [one for one in events if one["pid"] == rank and one["ph"] == "X"]
        categories = {one["cat"] for one in own}
        assert {"step", "operator", "bucket", "collective", "wait", "data"} <= categories, categories
        assert {one["name"] for one in own if one["cat"] == "step"} == {"step 3", "step 4"}


def free_port():
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return one.getsockname()[1]


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
