"""The report in a real browser: whether its parts are there, drawn, readable and reachable by
keyboard, and no error is logged.  python3 report_test.py SOURCE_DIR BUILD_DIR """

import html.parser
import json
import math
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile
import time

LOCKSTEP = pathlib.Path(sys.argv[2]) / "bin" / "lockstep"
SOURCE = pathlib.Path(sys.argv[1])
BROWSER = shutil.which("chromium")


def write_log(folder, ranks=4, reports=100, slow=None):
    """A run that learns, in which rank `slow` works 1.5 times as long."""
    folder.mkdir(parents=True)
    lines = [
        {
            "type": "run",
            "time": 1.7e9,
            "version": 1,
            "ranks": ranks,
            "name": "net",
            "config": {"training.seed": "1"},
            "environment": {"libtorch": "2.15.0"},
        }
    ]
    for i in range(1, reports + 1):
        working = [0.03 if rank == slow else 0.02 for rank in range(ranks)]
        step = max(working) + 0.002
        lines.append(
            {
                "type": "step",
                "time": 1.7e9 + i,
                "step": i * 10,
                "steps": 10,
                "epoch": 0,
                "seconds": i,
                "loss": 2 / i,
                "learning_rate": 0.1,
                "gradient_norm": 1 + 0.1 * math.sin(i),
                "samples": i * 640,
                "samples_per_second": 640,
                "ranks": {
                    "step_seconds": [step] * ranks,
                    "communication_seconds": [step - one for one in working],
                    "data_seconds": [0.001] * ranks,
                    "checkpoint_seconds": [0] * ranks,
                    "memory_bytes": [500 * 2**20] * ranks,
                },
            }
        )
    lines.append(
        {
            "type": "event",
            "time": 1.7e9,
            "kind": "warning",
            "step": 20,
            "rank": slow or 0,
            "text": "</td><script>document.title='broken'</script>",
            "advice": "Look.",
        }
    )
    lines.append(
        {
            "type": "end",
            "time": 1.7e9 + reports,
            "step": reports * 10,
            "seconds": reports,
            "outcome": "finished",
        }
    )
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def browse(page, folder, *flags):
    """The page's document as the browser has it after its program has run, and what the browser
    logged."""
    done = subprocess.run(
        [
            BROWSER,
            "--headless",
            "--no-sandbox",
            "--disable-gpu",
            f"--user-data-dir={folder}/browser",
            "--enable-logging=stderr",
            "--v=0",
            "--window-size=1200,900",
            *flags,
            "--virtual-time-budget=2000",
            "--dump-dom",
            f"file://{page}",
        ],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    said = [line for line in done.stderr.splitlines() if "CONSOLE" in line]
    return done.stdout, said


class Document(html.parser.HTMLParser):
    """What an examination of accessibility asks of a page."""

    def __init__(self, text):
        super().__init__()
        self.elements, self.open, self.faults = [], [], []
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        self.elements.append((tag, dict(attributes)))

    def all(self, tag):
        return [attributes for name, attributes in self.elements if name == tag]


def luminance(color):
    parts = [int(color[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(a, b):
    light, dark = sorted((luminance(a), luminance(b)), reverse=True)
    return (light + 0.05) / (dark + 0.05)


def test_colours_can_be_told_apart():
    css = (SOURCE / "src/train/report/page/report.css").read_text()
    themes = re.findall(r":root \{(.*?)\}", css, re.S)
    assert len(themes) == 3, "light, dark, print"
    for theme in themes:
        colors = dict(re.findall(r"--([\w-]+): (#[0-9a-f]{3,6})", theme))
        colors = {
            name: value if len(value) == 7 else "#" + "".join(c * 2 for c in value[1:])
            for name, value in colors.items()
        }
        for text in ("ink", "muted", "good", "bad"):
            for back in ("paper", "card", "bad-back"):
                assert contrast(colors[text], colors[back]) >= 4.5, (
                    text,
                    back,
                    contrast(colors[text], colors[back]),
                )
        for line in ("s1", "s2", "s3", "s4", "s5", "s6", "fast", "slow"):
            assert contrast(colors[line], colors["card"]) >= 3, (
                line,
                contrast(colors[line], colors["card"]),
            )


def test_the_page_in_a_browser(folder):
    write_log(folder / "a", slow=2)
    write_log(folder / "b")
    page = folder / "report.html"
    made = subprocess.run(
        [LOCKSTEP, "report", folder / "a", "--compare", folder / "b", "-o", page],
        capture_output=True,
        text=True,
        check=True,
    )
    assert "! Rank 2 works longest, and all wait for it." in made.stdout, made.stdout
    text, said = browse(page, folder)
    assert not said, said
    assert 'data-drawn="yes"' in text, "the charts were not drawn"
    assert "<title>a · Lockstep report</title>" in text, "what a log says was run as a program"
    document = Document(text)
    plots = [one for one in document.all("div") if "data-chart" in one]
    assert [one["data-chart"] for one in plots] == [
        "loss",
        "throughput",
        "learning_rate",
        "gradient_norm",
        "heat",
        "shares",
        "step_time",
        "memory",
    ]
    drawn = document.all("svg") + document.all("canvas")
    assert len(drawn) == len(plots)
    for one in drawn:
        assert (
            one.get("role") == "img" and one.get("aria-label") and one.get("tabindex") == "0"
        ), one
    assert any(
        "The slowest is rank 2, with 1.50 times the median" in one["aria-label"] for one in drawn
    )
    identifiers = [attributes["id"] for _, attributes in document.elements if "id" in attributes]
    assert len(identifiers) == len(set(identifiers))
    for link in document.all("a"):
        assert link["href"][1:] in identifiers, link
    assert document.all("html")[0]["lang"] == "en"
    levels = [int(tag[1]) for tag, _ in document.elements if re.fullmatch("h[1-6]", tag)]
    assert (
        levels[0] == 1
        and levels.count(1) == 1
        and all(b - a <= 1 for a, b in zip(levels, levels[1:]))
    ), levels
    for box in document.all("div"):
        if box.get("class") == "table":
            assert box.get("tabindex") == "0" and box.get(
                "aria-label"
            ), "a table that scrolls is reached by keyboard"
    assert all(cell.get("scope") in ("col", "row") for cell in document.all("th"))


def test_of_two_ranks_the_slow_one_stands_out(folder):
    write_log(folder / "a", ranks=2, slow=1)
    subprocess.run([LOCKSTEP, "report", folder / "a"], capture_output=True, check=True)
    text, said = browse(folder / "a" / "report.html", folder)
    assert not said, said
    assert [one.get("data-slow") for one in Document(text).all("canvas")] == ["rank 1"]


def test_the_shares_of_a_single_report_are_seen(folder):
    write_log(folder / "a", reports=1)
    subprocess.run([LOCKSTEP, "report", folder / "a"], capture_output=True, check=True)
    text, said = browse(folder / "a" / "report.html", folder)
    assert not said, said
    (area,) = [one["d"] for one in Document(text).all("path") if one.get("fill") == "var(--compute)"]
    across = [float(x) for x in re.findall(r"[ML]([\d.]+) ", area)]
    assert max(across) - min(across) > 10, area


def test_a_table_of_runs_has_their_values_of_the_same_step(folder):
    """The second run reports every 20 steps, the first every 10, and of the second's first 10 nothing is known."""
    write_log(folder / "a", reports=10)
    write_log(folder / "b", reports=5)
    log = folder / "b" / "metrics.jsonl"
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    for line in lines:
        line["step"] = 2 * line.get("step", 0)
    log.write_text("".join(json.dumps(line) + "\n" for line in lines))
    page = folder / "report.html"
    command = [LOCKSTEP, "report", folder / "a", "--compare", folder / "b", "-o", page]
    subprocess.run(command, capture_output=True, check=True)
    opened = "<script>for (const one of document.querySelectorAll('details')) one.open = true</script>"
    page.write_text(page.read_text().replace("</body>", opened + "</body>"))
    text, said = browse(page, folder)
    assert not said, said
    rows = re.findall(r'<tr><td class="n">(\d+)</td><td class="n">(.*?)</td><td class="n">(.*?)</td></tr>', text)
    for row in (("10", "2", ""), ("40", "0.5", "1"), ("100", "0.2", "0.4")):
        assert row in rows, rows[:10]


def test_ranks_that_left_are_no_crosses_and_names_spoil_no_chart(folder):
    """A restart on fewer ranks, and a value whose name has control characters."""
    write_log(folder / "a", ranks=4, reports=10)
    log = folder / "a" / "metrics.jsonl"
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    begin, reports = lines[0], [line for line in lines if line["type"] == "step"]
    for report in reports[5:]:
        report["ranks"] = {name: of[:2] for name, of in report["ranks"].items()}
    for report in reports:
        report["values"] = {"own\0\x1b[2J": 1.0}
    begun_again = {**begin, "ranks": 2, "resumed_at": 50, "restart": 1}
    log.write_text(
        "".join(json.dumps(line) + "\n" for line in [begin, *reports[:5], begun_again, *reports[5:]])
    )
    (folder / "a" / "trace.json").write_text("{}")
    page = folder / "a" / "report.html"
    subprocess.run([LOCKSTEP, "report", folder / "a"], capture_output=True, check=True)
    text, said = browse(page, folder)
    assert not said, said
    seen = text[: text.index("<script")]  # without the program, which has these words, too
    assert "This chart could not be drawn" not in seen
    assert "×" not in seen, "a rank that is not there is shown as a value that is not a number"
    document = Document(text)
    plots = [one for one in document.all("div") if "data-chart" in one]
    assert len(document.all("svg") + document.all("canvas")) == len(plots) == 9, len(plots)
    assert "trace.json" in [link["href"] for link in document.all("a")]


def test_a_long_run_on_many_ranks_is_small_and_quick(folder):
    """The bars: 2 MB, and painted within a second. Time is the browser's, with a margin for a
    machine that is busy."""
    write_log(folder / "long", ranks=64, reports=3000, slow=37)
    page = folder / "long.html"
    subprocess.run(
        [LOCKSTEP, "report", folder / "long", "-o", page], capture_output=True, check=True
    )
    assert page.stat().st_size <= 2_000_000, page.stat().st_size
    begun = time.monotonic()
    text, said = browse(page, folder)
    assert not said and 'data-drawn="yes"' in text, said
    print(
        f"  {page.stat().st_size:,} bytes, in the browser after "
        f"{time.monotonic() - begun:.2f} s with its start"
    )


def test_what_a_log_says_is_no_command_to_the_terminal(folder):
    write_log(folder / "a")
    log = folder / "a" / "metrics.jsonl"
    lines = log.read_text().splitlines()
    end = {**json.loads(lines[-1]), "failed": True, "outcome": "broken \x1b[2J\x9b5m"}
    log.write_text("\n".join([*lines[:-1], json.dumps(end)]) + "\n")
    for command in "report", "top":
        shown = subprocess.run(
            [LOCKSTEP, command, folder / "a"], capture_output=True, text=True, check=True
        ).stdout
        assert "\x1b" not in shown and "\x9b" not in shown, shown


def test_top_prints_the_state_where_there_is_no_terminal(folder):
    write_log(folder / "a", slow=1)
    shown = subprocess.run(
        [LOCKSTEP, "top", folder / "a"], capture_output=True, text=True, check=True
    ).stdout
    assert "step 1,000" in shown and "\x1b" not in shown and "1.50x" in shown, shown


def test_a_link_stays_one_and_a_pipe_gets_the_page(folder):
    write_log(folder / "a")
    (folder / "page.html").write_text("old")
    (folder / "link.html").symlink_to("page.html")
    report = [LOCKSTEP, "report", folder / "a", "-o"]
    subprocess.run([*report, folder / "link.html"], capture_output=True, check=True)
    assert (folder / "link.html").is_symlink()
    page = (folder / "page.html").read_text()
    assert page.startswith("<!DOCTYPE html>"), page[:50]
    # As -o /dev/stdout: of what goes there all is the page.
    (folder / "stdout").symlink_to("/dev/stdout")
    done = subprocess.run([*report, folder / "stdout"], capture_output=True, text=True, check=True)
    assert done.stdout == page and (folder / "stdout").is_symlink(), done.stdout[:50]


def test_what_cannot_be_read_is_said(folder):
    (folder / "garbage").write_text("nothing\n")
    for command, status, words in (
        (["report", folder / "none"], 1, "there is no log"),
        (["report"], 2, "RUN"),
        (["top", folder / "none"], 1, "there is no log"),
        (["top", "--once", folder / "garbage"], 1, "has no run in it: line 1: not a JSON object"),
    ):
        done = subprocess.run([LOCKSTEP, *command], capture_output=True, text=True, check=False)
        assert done.returncode == status and words in done.stderr, (command, done)


def main():
    if BROWSER is None:
        sys.exit("no chromium here: scripts/setup.sh --peers installs it")
    for name, test in list(globals().items()):
        if not name.startswith("test_"):
            continue
        with tempfile.TemporaryDirectory() as folder:
            test(*([pathlib.Path(folder)] if test.__code__.co_argcount else []))
        print(f"{name}: passed")


if __name__ == "__main__":
    os.environ.pop("NO_COLOR", None)
    main()
