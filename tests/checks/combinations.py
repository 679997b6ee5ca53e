"""Holds docs/combinations.md to the sources: every pair of features has a cell, named tests exist, refusals stand in
the sources, and the random programs know both sides of a pair that is theirs.

python3 combinations.py SOURCE_DIR BUILD_DIR
"""
import itertools
import pathlib
import re
import subprocess
import sys

TEST = re.compile(r"TEST(?:_P|_F)?\(\s*(\w+),\s*(\w+)\)")
KINDS = {"test", "refused", "apart", "open"}
TRANSPORTS = {"solo", "shm", "gloo", "tcp", "host-then-net"}  # parts of every program


def rows(text, title):
    """The cells of the first table below a title."""
    table = re.search(r"(^\|.*\n)+", text.split(title, 1)[1], re.MULTILINE)[0]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()[2:]]


def faults(source, parts, apart):
    text = (source / "docs" / "combinations.md").read_text()
    tests = {f"{suite}.{name}" for path in (source / "tests").rglob("*_test.cpp")
             for suite, name in TEST.findall(path.read_text())}
    # Adjacent literals are one.
    code = "".join(re.sub(r'"\s*\n\s*"', "", path.read_text()) for path in sorted((source / "src").rglob("*.cpp")))
    features = [(name, set(re.findall(r"`([\w-]+)`", own))) for _, name, own in rows(text, "## Features")]
    notes = {number: (kind, what) for number, kind, what in rows(text, "## Cells with a number")}
    for name, own in features:
        yield from (f"{name}: programs have no part {part}" for part in sorted(own - parts - TRANSPORTS))
    for number, (kind, what) in notes.items():
        if kind not in KINDS or not what:
            yield f"{number}: {kind} is none of {sorted(KINDS)}, or there is no text"
        named = re.findall(r"`(\w+\.\w+)`", what)
        yield from (f"{number}: there is no test {test}" for test in named if test not in tests)
        programs = re.findall(r"`(tests/[\w/]+\.py)`", what)
        yield from (f"{number}: there is no {program}" for program in programs if not (source / program).exists())
        named += programs
        if kind == "test" and not named:
            yield f"{number}: names no test"
        quoted = re.match(r'"([^"]+)"', what)
        if kind == "refused" and (not quoted or quoted[1] not in code):
            yield f"{number}: src says nothing like {what}"
    pairs = rows(text, "## Pairs")
    if len(pairs) != len(features) - 1:
        yield f"{len(pairs)} rows of pairs for {len(features)} features"
    used = set()
    for (index, row), (name, own) in zip(enumerate(pairs, 1), features[1:]):
        if row[0] != f"{index + 1} {name}":
            yield f"row {index + 1} is '{row[0]}', not '{index + 1} {name}'"
        for cell, (other, others) in zip(row[1:index + 1], features):
            words = cell.split()
            if not words:
                yield f"{other} and {name}: the cell is empty"
            used |= set(words)
            yield from (f"{other} and {name}: there is no {word}"
                        for word in words if word != "r" and word not in notes)
            meets = any(frozenset(pair) not in apart for pair in itertools.product(own, others))
            if "r" in words and not meets:
                yield f"{other} and {name}: no random program has both"
    yield from (f"{number}: no cell has it" for number in notes if number not in used)


if __name__ == "__main__":
    binary = pathlib.Path(sys.argv[2]) / "bin" / "random_training"
    lines = [line.split() for line in subprocess.run([binary, "--list", "parts"], check=True, capture_output=True,
                                                     text=True).stdout.splitlines()]
    known = {line[1] for line in lines if line[0] == "part"}
    never = [line for line in lines if line[0] == "apart"]
    # A part that no program has for the time being is apart from all.
    separate = {frozenset((one, other)) for _, one, names in never
                for other in ([names] if names != "*" else known | TRANSPORTS)}
    found = list(faults(pathlib.Path(sys.argv[1]), known, separate))
    print("\n".join(found) or "every pair of features is shown or refused")
    sys.exit(1 if found else 0)
