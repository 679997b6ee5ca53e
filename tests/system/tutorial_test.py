"""The programs of docs/tutorial.md are those of examples/tutorial, and do what the page says.

python3 tutorial_test.py SOURCE_DIR BUILD_DIR
"""
import difflib
import pathlib
import re
import subprocess
import sys

from support.program import run, run_cases

SOURCE, BUILD = pathlib.Path(sys.argv[1]).resolve(), pathlib.Path(sys.argv[2]).resolve()
PROGRAMS = SOURCE / "examples/tutorial"
LOCKSTEP = BUILD / "bin/lockstep"
PAGE = (SOURCE / "docs/tutorial.md").read_text()


def program(name):
    return BUILD / f"bin/tutorial_{name}"


def in_folder(folder, *words):
    return run("env", "-C", folder, *words)


def test_the_page_shows_the_programs(_folder):
    files = [path.read_text() for path in sorted(PROGRAMS.iterdir())]
    blocks = re.findall(r"^```cpp\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE)
    assert blocks, "docs/tutorial.md shows no program"
    for block in blocks:
        assert any(block in text for text in files), f"examples/tutorial has no such lines:\n{block}"


def test_the_page_shows_each_changed_line(_folder):
    one, many = (re.sub(r"^//.*\n", "", (PROGRAMS / f"{name}.cpp").read_text()).splitlines()
                 for name in ("one_process", "many_processes"))
    changed = [line for line in difflib.unified_diff(one, many, n=0, lineterm="")
               if not re.match(r"(---|\+\+\+|@@)", line)]
    shown = re.search(r"^```diff\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE).group(1).splitlines()
    shown = [line for line in shown if line[:1] in "+-" and line.strip()]
    assert shown == changed, "the page's differences are not those of the programs, which are:\n" + "\n".join(changed)


def test_on_one_process_and_on_many(folder):
    last = r"epoch 4: loss [\d.]+, right (\d+) %$"
    assert int(in_folder(folder, program("one_process")).expect(out=last).group(1)) >= 95
    assert int(in_folder(folder, program("many_processes")).expect(out=last).group(1)) >= 95
    for ranks in 2, 4:
        done = in_folder(folder, LOCKSTEP, "run", "--nproc-per-node", ranks, program("many_processes"))
        assert int(done.expect(out=last).group(1)) >= 90
        assert done.out.count("epoch 4") == 1, done  # one rank prints


def test_it_goes_on_with_another_number_of_ranks(folder):
    begun = in_folder(folder, LOCKSTEP, "run", "--nproc-per-node", 2, program("what_next"))
    begun.expect(out=r"epoch 4: right (100|9\d(\.\d+)?) % of 1000$")
    resumed = in_folder(folder, LOCKSTEP, "run", "--nproc-per-node", 3, program("what_next"))
    resumed.expect(out="resumes after step 320$")


def test_leak_sanitizer_finds_nothing(folder):
    """A user's program that is compiled with -fsanitize=address ends as it does without."""
    found = subprocess.run(["c++", "-print-file-name=liblsan.so"], capture_output=True, text=True, check=True).stdout
    assert "/" in found, "c++ has no liblsan.so: install GCC's libgcc-12-dev"
    in_folder(folder, f"LD_PRELOAD={found.strip()}", program("what_next")).expect(out="^epoch 4: ")


if __name__ == "__main__":
    run_cases([test_the_page_shows_the_programs, test_the_page_shows_each_changed_line, test_on_one_process_and_on_many,
               test_it_goes_on_with_another_number_of_ranks, test_leak_sanitizer_finds_nothing])
