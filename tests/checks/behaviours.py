"""Holds docs/ddp_behaviours.md to the tests: every row is there and names tests that exist, or says why it does not
apply; a test with a row's number stands in that row.

python3 behaviours.py SOURCE_DIR BUILD_DIR
"""
import pathlib
import re
import sys

ROWS = [f"B{number:02}" for number in range(1, 73)]
TEST = re.compile(r"TEST(?:_P|_F)?\(\s*(\w+),\s*(\w+)\)")


def faults(source):
    tests = {f"{suite}.{name}" for path in (source / "tests").rglob("*_test.cpp")
             for suite, name in TEST.findall(path.read_text())}
    page = (source / "docs" / "ddp_behaviours.md").read_text()
    lines = re.findall(r"^\| (B\d\d) \|[^|]*\|([^|]*)\|(.*)\|$", page, re.MULTILINE)
    if [row for row, _, _ in lines] != ROWS:
        yield f"the rows are not {ROWS[0]} to {ROWS[-1]}, each once and in order"
    for row, named, why in lines:
        named = set(re.findall(r"`(\w+\.\w+)`", named))
        numbered = {test for test in tests if row in test.split(".")[1].split("_")}
        if not named and not re.match(r"\s*does not apply: \S", why):
            yield f"{row}: neither a test nor a reason why it does not apply"
        yield from (f"{row}: there is no test {test}" for test in sorted(named - tests))
        yield from (f"{row}: {test} is not in the table" for test in sorted(numbered - named))


if __name__ == "__main__":
    found = list(faults(pathlib.Path(sys.argv[1])))
    print("\n".join(found) or "every row has its tests")
    sys.exit(1 if found else 0)
