"""Every link in the pages leads somewhere, to its heading too; every page that is cited is there and can be found from
README.md.

python3 links.py SOURCE_DIR BUILD_DIR
"""
import pathlib
import re
import subprocess
import sys

SOURCE = pathlib.Path(sys.argv[1]).resolve()
FENCE = re.compile(r"^(```|~~~).*?^\1", re.DOTALL | re.MULTILINE)
SPAN = re.compile(r"`[^`\n]*`")
LINK = re.compile(r"!?\[[^\]]*\]\(([^)\s]+)[^)]*\)|<(?:img|a|source)\b[^>]*?(?:src|srcset|href)=\"([^\"]+)\"")
HEADING = re.compile(r"^#{1,6} +(.*?) *#* *$", re.MULTILINE)


def tracked(*patterns):
    found = subprocess.run(["git", "-C", SOURCE, "ls-files", "--cached", "--others", "--exclude-standard", *patterns],
                           capture_output=True, text=True, check=True)
    return [name for name in found.stdout.split("\n") if name and (SOURCE / name).is_file()]


def anchors(page):
    """As GitHub makes them: lower case, punctuation left out, blanks to hyphens; a repeated one is numbered."""
    seen, found = {}, set()
    for heading in HEADING.findall(FENCE.sub("", page.read_text())):
        text = re.sub(r"[^\w\- ]", "", re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).lower()).replace(" ", "-")
        found.add(text if text not in seen else f"{text}-{seen[text]}")
        seen[text] = seen.get(text, 0) + 1
    return found | set(re.findall(r"<a (?:id|name)=\"([^\"]+)\"", page.read_text()))


faults, reached = [], {}
pages = tracked("*.md")
for name in pages:
    page = SOURCE / name
    text = FENCE.sub(lambda fence: "\n" * fence[0].count("\n"), page.read_text())
    text = SPAN.sub("", text)
    reached[name] = set()
    for link in LINK.finditer(text):
        target = link[1] or link[2]
        line = text[:link.start()].count("\n") + 1
        if re.match(r"[a-z]+:", target):
            continue  # the network is not asked
        path, _, anchor = target.partition("#")
        file = (page.parent / path).resolve() if path else page
        if not file.exists():
            faults.append(f"{name}:{line}: {target}: no such file")
        elif anchor and file.suffix == ".md" and anchor not in anchors(file):
            faults.append(f"{name}:{line}: {target}: no such heading")
        elif file.is_relative_to(SOURCE):
            reached[name].add(str(file.relative_to(SOURCE)))

# Pages that prose and comments cite by their path.
for name in tracked("*.md", "*.h", "*.cpp", "*.inl", "*.py", "*.sh", "*.cmake", "*.txt", "*.yaml", "Makefile",
                    ".ci/run"):
    for number, line in enumerate((SOURCE / name).read_text(errors="replace").splitlines(), 1):
        for cited in re.findall(r"(?<![\w/.])docs/[\w/.-]*\w", line):
            if not (SOURCE / cited).exists() and "build/docs" not in line:
                faults.append(f"{name}:{number}: {cited}: no such file")
            elif name.endswith(".md") and cited.endswith(".md"):
                reached[name].add(cited)

known, left = {"README.md"}, ["README.md"]
while left:
    for target in reached.get(left.pop(), ()):
        if target not in known and target.endswith(".md"):
            known.add(target)
            left.append(target)
faults += [f"{name}: README.md does not lead to it" for name in pages
           if name.startswith("docs/") and name not in known and not name.startswith("docs/api/")]

print("\n".join(faults) or f"{len(pages)} pages: every link leads somewhere")
sys.exit(1 if faults else 0)
