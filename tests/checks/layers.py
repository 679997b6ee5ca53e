"""Holds the rooms apart: includes point only left, the launcher stays free of torch, files stay
short, and lines of Python and of pages too; public headers go together with Qt's keywords, and refuse
what a program cannot be compiled with.

python3 layers.py SOURCE_DIR BUILD_DIR
"""

import pathlib
import re
import sys

ROOMS = [
    "core",
    "text",
    "comm",
    "c10d",
    "data",
    "checkpoint",
    "parallel",
    "models",
    "train",
    "rl",
    "plan",
    "launch",
]
# These need no torch, and of the rooms only core and text.
PLAIN = {"core", "text", "plan", "launch", "tools"}
# Of the room plan, what runs models and ranks; the rest is free of torch.
MEASURES = {"bench", "measure", "placement", "program"}
# Parts of other rooms that are free of torch: folders, which may include each other's headers, and
# the public headers that belong to them. The format's are one for each of its sources.
FOLDERS = {
    "checkpoint/format": {"format"},
    "train/config": {"config"},
    "train/report": {"report"},
    "rl/environment": {"chat", "embedded", "environment", "scores", "tau2"},
}
TEXT = "lockstep/text/utf8.h"  # which bytes are text
HEADERS = {
    "train/config": {"config", "config_extensions", "config_source", "config_texts", "model_config"},
    "train/report": {
        "open_metrics",
        "progress_display",
        "progress_line",
        "run_history",
        "run_log",
        "run_report",
        "run_warnings",
        "tensorboard",
    },
    "rl/environment": {
        "chat",
        "dialogue",
        "embedded",
        "environment",
        "episode",
        "message",
        "model_user",
        "scores",
        "split",
        "tau2",
        "tool_call",
        "trajectory",
        "user",
    },
}
INCLUDE = re.compile(r'^\s*#\s*include\s*[<"]([^">]+)[">]', re.MULTILINE)
QT = re.compile(r"\b(signals|slots|emit|foreach|forever)\b")  # macros, unless a program turns them off
SEARCHED = "include src tools tests examples benchmarks docs packaging python scripts".split()
SUFFIXES = {".h", ".cpp", ".inl", ".py", ".sh"}
MOST_LINES = 450
MOST_COLUMNS = 120  # of Python; those of C++ are clang-format's
MOST_OF_PROSE = 104


def long_prose(source):
    """Lines of pages that are no table, code or title, and are too long to read as text."""
    for page in [*source.glob("*.md"), *source.glob("docs/*.md")]:
        is_code = False
        for number, line in enumerate(page.read_text().split("\n"), 1):
            is_code ^= line.lstrip().startswith(("```", "~~~"))
            is_text = not (is_code or line.startswith(("|", "#", "    ", "[", "!", "<")))
            if is_text and len(line) > MOST_OF_PROSE:
                yield f"{page.relative_to(source)}:{number}: {len(line)} columns, {MOST_OF_PROSE} are the most"


def files(source):
    for folder in SEARCHED:
        yield from sorted(p for p in (source / folder).rglob("*") if p.suffix in SUFFIXES)


def room_of(name):
    if name.parts[0] == "tools":
        return "tools"
    return name.parts[2 if name.parts[0] == "include" else 1]


def part_of(name, headers):
    """What is free of torch and has the file: a room or a part of one; None for a file that may
    know torch."""
    room = room_of(name)
    if room in PLAIN and not (room == "plan" and MEASURES & {*name.parts, name.stem}):
        return room
    for part, folders in FOLDERS.items():
        if not part.startswith(f"{room}/"):
            continue
        if folders & {*name.parts} or (name.parts[0] == "include" and name.stem in headers[part]):
            return part
    return None


def is_of(part, included, headers):
    room = part.partition("/")[0]
    own = tuple(f"{room}/{folder}/" for folder in FOLDERS[part])
    if included.startswith(("lockstep/core/", *own)) or included == TEXT:
        return True
    return included.startswith(f"lockstep/{room}/") and stem_of(included) in headers[part]


def stem_of(included):
    return pathlib.Path(included).stem


def allowed_rooms(room):
    if room == "launch":
        return {"core"}
    if room == "tools":
        return {"core", "text", "plan", "launch"}
    return set(ROOMS[: ROOMS.index(room)])


def include_faults(name, included, headers):
    room, part = room_of(name), part_of(name, headers)
    first, _, rest = included.removeprefix("lockstep/").partition("/")
    if part and re.match(r"(torch|ATen|c10)/", included):
        yield f"includes {included}, but {part} is free of torch"
    is_ours = included.startswith("lockstep/") or first in ROOMS[2:]
    if part in FOLDERS and is_ours and not is_of(part, included, headers):
        yield f"includes {included}, which is not of {part}"
    if part == "plan" and first in ROOMS and first not in ("core", "plan"):
        if not (first == "train" and stem_of(included) in headers["train/config"]):
            yield f"includes {included}, and plan knows of other rooms only core and configurations"
    if not rest or first not in ROOMS or first == room:
        return
    known = {stem for of, stems in headers.items() if of.startswith(f"{first}/") for stem in stems}
    if room == "tools" and stem_of(included) in known:
        return
    if first not in allowed_rooms(room):
        yield f"includes {included}, and {first} is not left of {room}"


def headers_for_any_compiler(source):
    """Public headers that do not refuse what Lockstep cannot be used with, themselves or by those
    that they include."""
    folder = source / "include"
    left = {str(p.relative_to(folder)): INCLUDE.findall(p.read_text()) for p in folder.rglob("*.h")}
    refuse = {"lockstep/core/compiler.h"}
    while more := {name for name, included in left.items() if name not in refuse and refuse & {*included}}:
        refuse |= more
    yield from (f"include/{name}: includes no lockstep/core/compiler.h" for name in sorted(left.keys() - refuse))


def faults(source):
    formats = (source / "src/checkpoint/format").rglob("*.cpp")
    headers = HEADERS | {"checkpoint/format": {"error"} | {p.stem for p in formats}}
    for path in files(source):
        text, name = path.read_text(), path.relative_to(source)
        if (lines := text.count("\n")) > MOST_LINES:
            yield f"{name}: {lines} lines, {MOST_LINES} are the most"
        for number, line in enumerate(text.split("\n") if path.suffix == ".py" else [], 1):
            if len(line) > MOST_COLUMNS:
                yield f"{name}:{number}: {len(line)} columns, {MOST_COLUMNS} are the most"
        if name.parts[0] == "include":
            code = re.sub(r'//.*|"[^"\n]*"', "", text)
            yield from (f"{name}: {word} is a macro beside Qt" for word in sorted(set(QT.findall(code))))
        if name.parts[0] in ("include", "src", "tools") and room_of(name) in ROOMS + ["tools"]:
            for included in INCLUDE.findall(text):
                yield from (f"{name}: {fault}" for fault in include_faults(name, included, headers))


if __name__ == "__main__":
    source = pathlib.Path(sys.argv[1])
    found = [*faults(source), *long_prose(source), *headers_for_any_compiler(source)]
    print("\n".join(found) or "every include points left")
    sys.exit(1 if found else 0)
