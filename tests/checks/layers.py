"""Holds the rooms apart: includes point only left, the launcher stays free of torch, files stay short.

python3 layers.py SOURCE_DIR BUILD_DIR
"""
import pathlib
import re
import sys

ROOMS = ["core", "text", "comm", "c10d", "data", "checkpoint", "parallel", "models", "train", "rl", "plan", "launch"]
PLAIN = {"core", "text", "plan", "launch", "tools"}  # need no torch, and of the rooms only core and text
FORMAT = "checkpoint/format"  # its headers stand with those of the rest of the room
# What the program lockstep knows of the room train: folders, and the headers that belong to each.
TRAIN = {"train/config": {"config", "config_extensions", "config_texts", "model_config"},
         "train/report": {"open_metrics", "progress_line", "run_history", "run_log", "run_report", "run_warnings", "tensorboard"}}
# What of the room rl is free of torch: folders, which may include each other's headers.
RL = {"chat", "embedded", "environment", "scores", "tau2"}
RL_HEADERS = {"chat", "dialogue", "embedded", "environment", "episode", "message", "scores", "split", "tau2", "tool_call", "trajectory", "user"}
MEASURES = {"bench", "measure", "placement", "program"}  # of the room plan, what knows models and ranks; the rest is free of torch
INCLUDE = re.compile(r'^\s*#\s*include\s*[<"]([^">]+)[">]', re.MULTILINE)
MOST_LINES = 450


def faults(source):
    formats = {"error"} | {p.stem for p in (source / "src" / "checkpoint" / "format").glob("*.cpp")}
    for path in sorted(p for folder in ("include", "src", "tools", "tests", "examples", "benchmarks")
                       for p in (source / folder).rglob("*") if p.suffix in {".h", ".cpp", ".inl", ".py", ".sh"}):
        text, name = path.read_text(), path.relative_to(source)
        if (lines := text.count("\n")) > MOST_LINES:
            yield f"{name}: {lines} lines, {MOST_LINES} are the most"
        room = name.parts[2 if name.parts[0] == "include" else 1]
        room = "tools" if name.parts[0] == "tools" else room
        plain = room if room in PLAIN and not (room == "plan" and MEASURES & {*name.parts, name.stem}) else FORMAT if room == "checkpoint" and (
            "format" in name.parts or (name.parts[0] == "include" and name.stem in formats)) else next(
            (part for part, headers in TRAIN.items() if room == "train" and (
                part.removeprefix("train/") in name.parts or (name.parts[0] == "include" and name.stem in headers))), None)
        if room == "rl" and (RL & set(name.parts) or (name.parts[0] == "include" and name.stem in RL_HEADERS)):
            plain = "rl/environment"
        if name.parts[0] not in ("include", "src", "tools") or room not in ROOMS + ["tools"]:
            continue
        for included in INCLUDE.findall(text):
            first, _, rest = included.removeprefix("lockstep/").partition("/")
            if plain and re.match(r"(torch|ATen|c10)/", included):
                yield f"{name}: includes {included}, but {plain} is free of torch"
            if plain == FORMAT and re.match(r"(checkpoint|lockstep)/", included) and not (
                    included.startswith(("checkpoint/format/", "lockstep/core/")) or pathlib.Path(included).stem in formats):
                yield f"{name}: includes {included}, which is not of {plain}"
            if plain in TRAIN and re.match(r"(checkpoint|comm|data|parallel|train|lockstep)/", included) and not (
                    included.startswith((plain + "/", "lockstep/core/")) or
                    (included.startswith("lockstep/train/") and pathlib.Path(included).stem in TRAIN[plain])):
                yield f"{name}: includes {included}, which is not of {plain}"
            if plain == "rl/environment" and re.match(r"(checkpoint|comm|data|parallel|models|train|rl|lockstep)/", included) and not (
                    included.startswith(("lockstep/core/", *(f"rl/{folder}/" for folder in RL))) or
                    (included.startswith("lockstep/rl/") and pathlib.Path(included).stem in RL_HEADERS)):
                yield f"{name}: includes {included}, which is not of {plain}"
            if plain == "plan" and first in ROOMS and first not in ("core", "plan") and not (
                    first == "train" and pathlib.Path(included).stem in TRAIN["train/config"]):
                yield f"{name}: includes {included}, and plan knows of other rooms only core and configurations"
            if not rest or first not in ROOMS or first == room:
                continue
            if room == "tools" and (first, pathlib.Path(included).stem) in {("checkpoint", f) for f in formats} | {
                    ("train", header) for headers in TRAIN.values() for header in headers} | {("rl", header) for header in RL_HEADERS}:
                continue
            allowed = {"core"} if room == "launch" else {"core", "text", "plan", "launch"} if room == "tools" else ROOMS[:ROOMS.index(room)]
            if first not in allowed:
                yield f"{name}: includes {included}, and {first} is not left of {room}"


if __name__ == "__main__":
    found = list(faults(pathlib.Path(sys.argv[1])))
    print("\n".join(found) or "every include points left")
    sys.exit(1 if found else 0)
