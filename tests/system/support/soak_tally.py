"""What the soak has counted, by kind of fault and transport: as a table, and as a file that several
runs add to."""

import json
import pathlib
import statistics
import threading

COUNTS = ("injected", "detected", "healed", "hangs", "leftovers", "wrong")
TIMES = (
    "known",
    "over",
    "again",
)  # seconds: all others knew; the job was over; the next attempt trained


class Tally:
    def __init__(self):
        self.lock = threading.Lock()
        self.rows, self.runs = {}, []

    def row(self, kind, where):
        return self.rows.setdefault(
            f"{kind}/{where}", dict.fromkeys(COUNTS, 0) | {name: [] for name in TIMES}
        )

    def count(self, kind, where, what, **seconds):
        with self.lock:
            row = self.row(kind, where)
            row[what] += 1
            for name, value in seconds.items():
                row[name].append(round(value, 4))

    def add(self, other):
        self.runs += other.runs
        for key, theirs in other.rows.items():
            own = self.row(*key.split("/"))
            for name in (*COUNTS, *TIMES):
                own[name] += theirs[name]

    def total(self, what):
        return sum(row[what] for row in self.rows.values())

    def bad(self):
        return sum(self.total(what) for what in ("hangs", "leftovers", "wrong"))

    @staticmethod
    def read(path):
        tally = Tally()
        if pathlib.Path(path).exists():
            stored = json.loads(pathlib.Path(path).read_text())
            tally.rows, tally.runs = stored["rows"], stored["runs"]
        return tally

    def write(self, path):
        pathlib.Path(path).write_text(json.dumps({"runs": self.runs, "rows": self.rows}, indent=1))

    def __str__(self):
        lines = [
            f"{'fault':24} {'over':6}"
            + "".join(f"{name:>10}" for name in COUNTS)
            + "".join(f"{name + ', median':>15} {'worst':>7}" for name in TIMES)
        ]
        for key, row in sorted(self.rows.items()):
            kind, where = key.split("/")
            line = f"{kind:24} {where:6}" + "".join(f"{row[name]:10}" for name in COUNTS)
            for name in TIMES:
                values = row[name]
                line += (
                    f"{statistics.median(values):13.2f} s {max(values):5.2f} s"
                    if values
                    else f"{'-':>15} {'-':>7}"
                )
            lines.append(line)
        minutes = sum(run["minutes"] for run in self.runs)
        total = {name: self.total(name) for name in COUNTS}
        lines.append(
            f"{minutes:.1f} min in {len(self.runs)} runs: {total['injected']} faults injected "
            f"({total['injected'] / max(minutes, 1e-9):.0f} a minute), "
            f"{total['detected']} detected, {total['healed']} healed by a restart, "
            f"{total['hangs']} hangs, {total['leftovers']} leftovers, {total['wrong']} wrong ends"
        )
        return "\n".join(lines)
