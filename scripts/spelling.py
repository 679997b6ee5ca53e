"""Spelling of the documentation, the headers' comments and the library's messages, by aspell with docs/words.txt.

python3 scripts/spelling.py [--new]

--new prints the unknown words alone, one a line: what may go into docs/words.txt. What looks like code is left out:
fenced blocks, text between backquotes, paths, addresses, identifiers with capitals inside, underscores, digits or
colons.
"""
import collections
import pathlib
import re
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent
CODE = re.compile(r"```.*?```|`[^`\n]*`|<[^>\n]*>|\$\{[^}]*\}|\]\([^)]*\)|https?://\S+|"
                  r"\S*[/_:=@#\\{}<>]\S*|\S*\w\.\w\S*|\S*\d\S*|\B--?\w[\w-]*", re.DOTALL)
WORD = re.compile(r"[A-Za-z]+(?:'[a-z]+)?")


def tracked(*patterns):
    listed = subprocess.run(["git", "-C", ROOT, "ls-files", *patterns], capture_output=True, text=True, check=True)
    return listed.stdout.split()


def comments(text):
    """Comment lines, and comments at the ends of lines; indented code within them is left out."""
    lines = []
    for line in text.splitlines():
        found = re.match(r"^\s*// ?(.*)$", line) or re.match(r"^.*\S\s+// (.*)$", line)
        lines.append(found[1] if found and not found[1].startswith("  ") and "NOLINT" not in found[1] else "")
    return "\n".join(lines)


def messages(text):
    """The string literals that hold more than one word."""
    lines = []
    for line in text.splitlines():
        literals = re.findall(r'"((?:[^"\\]|\\.)*)"', line) if not re.match(r"^\s*(//|#)", line) else []
        lines.append(" ".join(re.sub(r"\\.|\[[\w:]*\]|%\w", " ", literal)
                              for literal in literals if " " in literal.strip()))
    return "\n".join(lines)


def words_of(name):
    text = (ROOT / name).read_text(encoding="utf-8")
    if name.endswith(".cpp") or (name.endswith(".h") and not name.startswith("include/")):
        text = messages(text)
    elif name.endswith(".h"):
        text = comments(text) + messages(text)
    for number, line in enumerate(CODE.sub(lambda found: "\n" * found[0].count("\n") + " ", text).splitlines(), 1):
        for word in WORD.findall(line):
            if len(word) > 1 and word[1:].islower():  # no names such as MASTER_PORT, ZeRO, GiB
                yield word, number


places = collections.defaultdict(list)
for name in tracked("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "docs/*.md",
                    "include/*.h", "src/*.h", "src/*.cpp", "tools/*.h", "tools/*.cpp"):
    for word, line in words_of(name):
        places[word].append(f"{name}:{line}")

own = set((ROOT / "docs/words.txt").read_text().split()) if (ROOT / "docs/words.txt").exists() else set()
checked = subprocess.run(["aspell", "list", "--lang=en", "--encoding=utf-8"], input="\n".join(sorted(places)),
                         capture_output=True, text=True)
if checked.returncode != 0:
    sys.exit(f"aspell: {checked.stderr.strip()} (scripts/setup.sh --dev installs it)")
unknown = sorted(word for word in set(checked.stdout.split())
                 if word not in own and word.lower() not in own and word.removesuffix("'s") not in own)
if "--new" in sys.argv:
    print("\n".join(unknown))
else:
    for word in unknown:
        print(f"{places[word][0]}: '{word}'" + (f" ({len(places[word])} times)" if len(places[word]) > 1 else ""))
    print(f"{len(unknown)} unknown words" + (": mend them, or add them to docs/words.txt" if unknown else ""))
sys.exit(1 if unknown else 0)
