"""The README's program is the one that install_test.py builds and runs, its commands are there, and CI runs them; the
tree in docs/architecture.md names what is there.

python3 readme_test.py SOURCE_DIR BUILD_DIR
"""
import pathlib
import re
import subprocess
import sys

source = pathlib.Path(sys.argv[1])
readme = (source / "README.md").read_text()
faults = [f"README.md does not show {name} as it is"
          for name in ("tests/system/consumer/main.cpp", "tests/system/consumer/CMakeLists.txt")
          if (source / name).read_text() not in readme]

version = re.search(r"project\(lockstep VERSION (\d+\.\d+)", (source / "CMakeLists.txt").read_text()).group(1)
if f"find_package(lockstep {version} " not in readme:
    faults.append(f"README.md does not ask for version {version}, which CMakeLists.txt states")

commands = re.search(r"## Two commands\n.*?```\n(.*?)```", readme, re.DOTALL).group(1).splitlines()
for command in (line.split("#")[0].split() for line in commands):
    if command[:1] != ["make"] or subprocess.run([*command, "-n", "-C", source], capture_output=True).returncode != 0:
        faults.append(f"README.md's command '{' '.join(command)}' cannot be run")
if not re.search(r"^make test$", (source / ".ci/run").read_text(), re.MULTILINE):
    faults.append(".ci/run does not run README.md's make test")

architecture = (source / "docs/architecture.md").read_text()
tree = re.search(r"## What is where\n\n```\n(.*?)```", architecture, re.DOTALL).group(1)
folders = []  # of the lines above, by indentation
for line in tree.splitlines():
    depth = (len(line) - len(line.lstrip())) // 2
    words = re.split(r"\s{2,}", line.strip())[0].split(", ")
    for word in words:
        here = pathlib.Path(*folders[:depth])
        if "." in word or word.endswith("/") or word == "Makefile":
            if not (source / here / word).exists():
                faults.append(f"docs/architecture.md's tree names {here / word}, which is not there")
    if words[0].endswith("/"):
        folders = folders[:depth] + [words[0]]
named = {line.split("/")[0] for line in tree.splitlines() if "/" in line and not line.startswith(" ")}
tracked = subprocess.run(["git", "-C", source, "ls-tree", "-d", "--name-only", "HEAD"], capture_output=True, text=True)
present = {name for name in tracked.stdout.split() if not name.startswith(".")}
faults += [f"docs/architecture.md's tree does not name {folder}/" for folder in sorted(present - named)]

print("\n".join(faults) or "README.md agrees with the sources")
sys.exit(1 if faults else 0)
