"""Makes the wheel "lockstep" from a build: torch.distributed's backend, launcher, headers, libraries, CMake package.

python3 build_wheel.py BUILD_DIR OUT_DIR

`pip install` puts all of it into site-packages/lockstep, beside the torch for which it was built: that minor version,
as METADATA says, since the virtual tables of c10d's classes change from one to the next. Libraries that neither torch
nor every Debian 12 has go along.
"""
import base64
import hashlib
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile

# Of libraries that the package needs: those of the system, of the C++ compiler, of torch.
NOT_OURS = re.compile(r"^(linux-vdso|ld-linux|lib(c|m|dl|rt|util|pthread|gcc_s|stdc\+\+|resolv|z|ssl|crypto|"
                      r"torch\w*|c10\w*|cu\w*|nv\w*|gomp.*))[-.]")
LICENSES = {"fmt": "libfmt9", "yaml-cpp": "libyaml-cpp0.7", "jpeg": "libjpeg62-turbo",
            "png": "libpng16-16"}
ENTRY_POINTS = "\n[console_scripts]\nlockstep = lockstep.__main__:main\n"


def run(*command):
    return subprocess.run([str(part) for part in command], check=True, text=True, capture_output=True).stdout


def needed(library):
    """Name and path of all that the loader takes for it."""
    for line in run("ldd", library).splitlines():
        match = re.match(r"\s*(\S+) => (/\S+)", line)
        if match:
            yield match.groups()


def set_runpath(file, runpath):
    """Replaces the build machine's path to torch by a shorter one, in place; what needs no torch stays as installed."""
    old = re.search(r"\((?:RUNPATH|RPATH)\).*\[(.*)\]", run("readelf", "-d", file))
    if not old or "/torch/" not in old[1]:
        return
    with tempfile.NamedTemporaryFile("w", suffix=".cmake") as script:
        script.write(f'file(RPATH_CHANGE FILE "{file}" OLD_RPATH [[{old[1]}]] NEW_RPATH [[{runpath}]])\n')
        script.flush()
        run("cmake", "-P", script.name)


def stage(build, package):
    """The package's folder, as it will be installed."""
    run("cmake", "--install", build, "--prefix", package, "--strip")
    lib = package / "lib"
    bundled = {}
    for file in sorted((build / "python" / "lockstep").iterdir()):
        if file.suffix in (".py", ".so"):
            shutil.copy2(file, package / file.name)
    binding = next(package.glob("_C*.so"))
    run("strip", binding)
    files = [*lib.glob("*.so*"), *(package / "bin").iterdir(), binding]
    ours = [file for file in files if file.is_file() and not file.is_symlink()]
    for file in ours:
        for name, path in needed(file):
            if not NOT_OURS.match(name) and not name.startswith("liblockstep"):
                bundled[name] = path
    # A wheel has no links: each library is there once, by the name that the loader asks for.
    for library in lib.glob("*.so*"):
        if library.is_symlink():
            target = library.resolve()
            library.unlink()
            if re.search(r"\.so\.\d+$", library.name):
                target.rename(library)
    for library in lib.glob("lib*.so.0"):
        for text in (lib / "cmake" / "lockstep").glob("*.cmake"):
            text.write_text(re.sub(rf"{library.stem}\.0\.\d+\.\d+", library.name, text.read_text()))
    for name, path in bundled.items():
        shutil.copy2(path, lib / name)
    for file in [*lib.glob("liblockstep*.so*")]:
        set_runpath(file, "$ORIGIN:$ORIGIN/../../torch/lib")
    for file in (package / "bin").iterdir():
        set_runpath(file, "$ORIGIN/../lib:$ORIGIN/../../torch/lib")
    set_runpath(binding, "$ORIGIN/lib:$ORIGIN/../torch/lib")
    return sorted(bundled)


def record(root):
    for file in sorted(p for p in root.rglob("*") if p.is_file()):
        digest = base64.urlsafe_b64encode(hashlib.sha256(file.read_bytes()).digest()).rstrip(b"=").decode()
        yield f"{file.relative_to(root)},sha256={digest},{file.stat().st_size}\n"


def main():
    build, out = (pathlib.Path(argument).resolve() for argument in sys.argv[1:3])
    source = pathlib.Path(__file__).resolve().parents[2]
    info_from = next((build / "python").glob("lockstep-*.dist-info"))
    version = info_from.name.removesuffix(".dist-info").split("-")[1]
    tag = re.search(r"_C\.cpython-(\d+)", next((build / "python" / "lockstep").glob("_C*.so")).name)[1]
    tags = f"cp{tag}-cp{tag}-linux_{os.uname().machine}"
    out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        root = pathlib.Path(folder)
        bundled = stage(build, root / "lockstep")
        info = root / info_from.name
        shutil.copytree(info_from, info)
        with (info / "entry_points.txt").open("a") as file:
            file.write(ENTRY_POINTS)
        (info / "WHEEL").write_text(f"Wheel-Version: 1.0\nGenerator: lockstep\nRoot-Is-Purelib: false\nTag: {tags}\n")
        shutil.copy2(source / "LICENSE", info / "LICENSE")
        for library in bundled:
            name = next((name for name in LICENSES if name in library), None)
            terms = name and pathlib.Path(f"/usr/share/doc/{LICENSES[name]}/copyright")
            if terms and terms.exists():
                shutil.copy2(terms, info / f"LICENSE.{name}")
        (info / "RECORD").write_text("".join(record(root)) + f"{info.name}/RECORD,,\n")
        wheel = out / f"lockstep-{version}-{tags}.whl"
        with zipfile.ZipFile(wheel, "w", zipfile.ZIP_DEFLATED) as archive:
            for file in sorted(p for p in root.rglob("*") if p.is_file()):
                archive.write(file, file.relative_to(root))
    print(wheel)
    print(f"{wheel.stat().st_size / 1e6:.1f} MB, with {', '.join(bundled)}", file=sys.stderr)


main()
