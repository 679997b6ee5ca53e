"""Writes the API reference with Doxygen; its warnings are errors.

python3 docs/api/make.py SOURCE_DIR

Each class, struct, enumeration, type and function of the public headers has words of its own, or shares those above
it. What needs none: copies, moves, destructors and comparisons; ranges and their iterators; overrides, whose contract
is the base's; fields, of which the struct's words speak.
"""
import pathlib
import re
import subprocess
import sys

source = pathlib.Path(sys.argv[1]).resolve()
(source / "build/docs/api").mkdir(parents=True, exist_ok=True)
doxygen = subprocess.run(["doxygen", "docs/api/Doxyfile"], cwd=source, capture_output=True, text=True)

# Member Name(Name &&) ... of class room::Name; Member operator==(...) ...
SELF_EVIDENT = re.compile(r"Member (operator(=|==|!=)|~)|Member (\w+)\((const )?\3 *(&&|&) ?\w*\)|"
                          r"Member (\w+)\((const )?\6\s*<[^>]*> *(&&|&) ?\w*\)|\boverride\b|"
                          r"\(variable\) of (struct|class) |::Iterator\b|\b(begin|end)\(\)( const)? \(function\)")
findings = []
for line in doxygen.stderr.splitlines():
    if re.match(r"\S+:\d+: (warning|error): ", line) or line.startswith(("error:", "warning:")):
        findings.append(line.replace(f"{source}/", "").replace("error: ", ""))
    elif findings:
        findings[-1] += "\n" + line  # what belongs to the one before
findings = sorted({finding for finding in findings if not SELF_EVIDENT.search(finding)})

print("\n".join(findings) or f"API reference: {source}/build/docs/api/html/index.html")
sys.exit(1 if findings or doxygen.returncode else 0)
