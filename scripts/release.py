"""Makes a release's artefacts from a finished build: packages, sources, and a page that lists them with checksums.

python3 scripts/release.py BUILD_DIR OUT_DIR
"""
import hashlib
import pathlib
import re
import subprocess
import sys


def version(source):
    return re.search(r"project\(lockstep VERSION ([\d.]+)", (source / "CMakeLists.txt").read_text())[1]


def notes(source, number):
    """What the changelog says of a version, or of what is not released yet."""
    parts = re.split(r"^## ", (source / "CHANGELOG.md").read_text(), flags=re.M)[1:]
    for title in number, "Unreleased":
        for part in parts:
            if part.startswith(title):
                return part.split("\n", 1)[1].strip()
    raise SystemExit(f"[release] CHANGELOG.md has neither {number} nor Unreleased")


def main():
    source = pathlib.Path(__file__).resolve().parents[1]
    build, out = (pathlib.Path(argument).resolve() for argument in sys.argv[1:3])
    number = version(source)
    out.mkdir(parents=True, exist_ok=True)
    subprocess.run(["cpack", "--config", build / "CPackConfig.cmake", "-B", out], check=True, stdout=subprocess.DEVNULL)
    archive = out / f"lockstep-{number}-source.tar.gz"
    subprocess.run(["git", "-C", source, "archive", "--format=tar.gz", f"--prefix=lockstep-{number}/", "-o", archive,
                    "HEAD"], check=True)
    files = sorted(file for file in out.iterdir() if re.search(r"\.(deb|tar\.gz|whl)$", file.name))
    sums = {file: hashlib.sha256(file.read_bytes()).hexdigest() for file in files}
    (out / "SHA256SUMS").write_text("".join(f"{digest}  {file.name}\n" for file, digest in sums.items()))
    rows = "".join(f"| {file.name} | {file.stat().st_size / 1e6:.1f} MB | `{digest}` |\n"
                   for file, digest in sums.items())
    (out / "RELEASE.md").write_text(
        f"# Lockstep {number}\n\n| file | size | SHA-256 |\n|---|---|---|\n{rows}\n"
        f"`sha256sum -c SHA256SUMS` checks what was downloaded. docs/packages.md says how each is installed.\n\n"
        f"{notes(source, number)}\n")
    print(f"[release] {len(files)} files and RELEASE.md in {out}")


if __name__ == "__main__":
    main()
