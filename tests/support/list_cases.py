"""Writes CTest's entries for a program of GoogleTest cases: one for every dozen cases of a suite.

  python3 list_cases.py PROGRAM PREFIX OUT [EXCLUDE]

An entry for each case would start the program thousands of times, and each start loads libtorch for half a second.
Cases whose full name matches the regular expression EXCLUDE are left out.
"""

import re
import subprocess
import sys

CASES_OF_AN_ENTRY = 12


def suites(program: str) -> dict[str, list[str]]:
    """The cases of each suite, in the program's order, without the disabled ones."""
    listed = subprocess.run([program, "--gtest_list_tests"], check=True, capture_output=True, text=True).stdout
    cases: dict[str, list[str]] = {}
    suite = ""
    for line in listed.splitlines():
        name = line.split("#")[0].rstrip()
        if not name.startswith(" "):
            suite = name.removesuffix(".")
        elif "DISABLED_" not in suite + name:
            cases.setdefault(suite, []).append(f"{suite}.{name.strip()}")
    return cases


def main() -> None:
    program, prefix, out, *exclude = sys.argv[1:]
    lines = []
    for suite, cases in suites(program).items():
        cases = [case for case in cases if not (exclude and re.search(exclude[0], case))]
        parts = range(0, len(cases), CASES_OF_AN_ENTRY)
        for number, first in enumerate(parts, start=1):
            name = f"{prefix}.{suite}" + (f".{number}" if len(parts) > 1 else "")
            some = cases[first:first + CASES_OF_AN_ENTRY]
            lines.append(f"add_test([=[{name}]=] [=[{program}]=] [=[--gtest_filter={':'.join(some)}]=])")
            # Of those that are alike the long ones start first.
            lines.append(f"set_tests_properties([=[{name}]=] PROPERTIES TIMEOUT 1200 COST {len(some)})")
    if not lines:
        sys.exit(f"{program} lists no cases")
    with open(out, "w") as file:
        file.write("\n".join(lines) + "\n")


main()
