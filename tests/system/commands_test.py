"""Each `lockstep run` that the pages show is understood as it stands: it is run with --dry-run, on programs of that
name that do nothing.

python3 commands_test.py SOURCE_DIR BUILD_DIR
"""
import os
import pathlib
import re
import shlex
import sys

from support.program import run, run_cases

SOURCE, BUILD = pathlib.Path(sys.argv[1]).resolve(), pathlib.Path(sys.argv[2]).resolve()
LOCKSTEP = BUILD / "bin/lockstep"


def shown():
    """(page, words behind `lockstep run`) for each command in a block of a page."""
    for page in [SOURCE / "README.md", *sorted((SOURCE / "docs").glob("*.md"))]:
        for block in re.findall(r"^```\w*\n(.*?)^```", page.read_text(), re.DOTALL | re.MULTILINE):
            for line in re.findall(r"^(?:\$ )?lockstep run (.*)$", block, re.MULTILINE):
                yield page.name, shlex.split(line, comments=True)


def test_each_command_is_understood(folder):
    commands = list(shown())
    assert len(commands) >= 8, commands
    for name in "train", "mnist", "three_domain", "tutorial_many_processes", "tutorial_what_next":
        (pathlib.Path(folder) / name).symlink_to("/bin/true")
    programs = pathlib.Path(folder) / "build/release/bin"
    programs.mkdir(parents=True)
    (programs / "gpt").symlink_to("/bin/true")
    (pathlib.Path(folder) / "default_config.yaml").write_text("compute_environment: LOCAL_MACHINE\nnum_processes: 2\n")
    for page, words in commands:
        flags = [] if {"--dry-run", "--print-env"} & set(words) else ["--dry-run"]
        program = [] if any(re.match(r"(\./)?[a-z_]+$", word) for word in words) else ["train"]
        done = run("env", "-C", folder, LOCKSTEP, "run", *flags, *words, *program,
                   PATH=f"{folder}:{os.environ['PATH']}")
        assert done.status == 0, f"{page} shows `lockstep run {' '.join(words)}`:\n{done}"


if __name__ == "__main__":
    run_cases([test_each_command_is_understood])
