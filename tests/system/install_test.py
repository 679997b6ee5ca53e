"""Packages and `cmake --install`, then outside projects that find Lockstep there, build, and train on two ranks.

python3 install_test.py SOURCE_DIR BUILD_DIR
"""
import hashlib
import pathlib
import re
import subprocess
import sys

from support.program import run, run_cases

SOURCE, BUILD = pathlib.Path(sys.argv[1]).resolve(), pathlib.Path(sys.argv[2]).resolve()
BESIDE_TORCH = SOURCE / "tests/system/consumer/beside_torch"
LIBTORCH = pathlib.Path(re.search(r"^LockstepTorch_FOLDER:.*=(.*)$", (BUILD / "CMakeCache.txt").read_text(), re.M)[1])


def install(folder):
    run("cmake", "--install", BUILD, "--prefix", folder + "/prefix").expect()
    return folder + "/prefix"


def configure(build, project, *flags):
    return run("cmake", "-S", project, "-B", build, "-G", "Ninja", "-DCMAKE_BUILD_TYPE=Release", *flags)


def packages(folder):
    """The .deb and the .tar.gz, each unpacked; the prefixes."""
    run("cpack", "--config", BUILD / "CPackConfig.cmake", "-B", folder + "/packages", limit_s=300).expect()
    (deb,), (tar,) = (list(pathlib.Path(folder, "packages").glob(kind)) for kind in ("*.deb", "*.tar.gz"))
    run("dpkg-deb", "-x", deb, folder + "/deb").expect()
    pathlib.Path(folder, "tar").mkdir()
    run("tar", "-xzf", tar, "--strip-components=1", "-C", folder + "/tar").expect()
    return deb, folder + "/deb/usr", folder + "/tar"


def digests(prefix):
    return {str(file.relative_to(prefix)): hashlib.sha256(file.read_bytes()).hexdigest()
            for file in pathlib.Path(prefix).rglob("*") if file.is_file() and not file.is_symlink()}


def expect_no_path_of_this_machine(prefix):
    for file in pathlib.Path(prefix).rglob("*"):
        if not file.is_file() or file.is_symlink():
            continue
        assert str(LIBTORCH).encode() not in file.read_bytes(), f"{file} names {LIBTORCH}"
        if file.suffix in (".cmake", ".h"):
            assert str(SOURCE) not in file.read_text(), f"{file} names {SOURCE}"


def expect_names_of_its_own(prefix):
    """What is no template or inline function, and so may take the place of a program's, is in lockstep's namespace.

    And a program's own spdlog, of any version, takes the place of nothing: spdlog's names do not tell its version.
    """
    for library in pathlib.Path(prefix).rglob("liblockstep*.so.*"):
        for line in run("nm", "-D", "-C", library).out.splitlines():
            assert not re.match(r"\w+ [TDBR] ", line) or "lockstep::" in line, f"{library}: {line}"
            assert "spdlog::" not in line, f"{library}: {line}"
        # Of headers that programs use with flags of their own, nothing is shared with them.
        for line in run("nm", "-D", library).out.splitlines():
            assert not re.search(r" [VWu] _Z(N|NK|T.N|NK?St.*)(3fmt|8nlohmann|4YAML)", line), f"{library}: {line}"
        dynamic = run("readelf", "-d", library).out
        assert "libfmt" not in dynamic and "NODELETE" in dynamic, dynamic


def test_packages_and_what_is_built_with_them(folder):
    deb, prefix, unpacked = packages(folder)
    # The same files, which know nothing of this machine.
    assert digests(prefix) == digests(unpacked), set(digests(prefix).items()) ^ set(digests(unpacked).items())
    expect_no_path_of_this_machine(prefix)
    expect_names_of_its_own(prefix)
    needs = run("dpkg-deb", "-f", deb, "Depends").out
    for package in "libc6", "libssl3", "libyaml-cpp", "zlib1g":
        assert package in needs, needs
    version = run("dpkg-deb", "-f", deb, "Version").out.strip()
    for place in prefix, unpacked:
        run(place + "/bin/lockstep", "--version").expect(out=re.escape(version))

    build = folder + "/build"
    configure(build, SOURCE / "tests/system/consumer", f"-DCMAKE_PREFIX_PATH={prefix};{LIBTORCH}").expect()
    run("cmake", "--build", build, limit_s=600).expect()
    loss = run(prefix + "/bin/lockstep", "run", "--nproc-per-node", 2, build + "/train").expect(
        out=r"^\[rank 0\] epoch 1: loss ([\d.]+)$").group(1)
    assert float(loss) < 0.8, loss  # of the last batch; 2.3 before training
    # With the other package's libraries.
    run("env", f"LD_LIBRARY_PATH={unpacked}/lib", build + "/train").expect(out=r"^epoch 1: loss [\d.]+$")


def beside_torch(build, packages, *flags, root=LIBTORCH):
    return configure(build, BESIDE_TORCH, f"-DPACKAGES={packages}", f"-DTorch_DIR={BESIDE_TORCH / 'torch'}",
                     f"-DTORCH_ROOT={root}", *flags)


def expect_startable(build, configured):
    """Nothing links libtorch_cuda.so where it cannot be loaded, and what is to be removed was said then."""
    configured.expect()
    cuda = LIBTORCH / "lib/libtorch_cuda.so"
    if not cuda.exists() or "not found" not in subprocess.run(["ldd", cuda], capture_output=True, text=True).stdout:
        return
    configured.expect(err=r"Remove\s+find_package\(Torch\)\s+and\s+\$\{TORCH_LIBRARIES\}")
    linked = run("ninja", "-C", build, "-t", "commands", "start").out
    assert "libtorch_cpu.so" in linked and "libtorch_cuda.so" not in linked, linked[-3000:]


def test_a_project_that_finds_torch_first(folder):
    prefix, build = install(folder), folder + "/build"
    expect_startable(build, beside_torch(build, "Torch;lockstep", f"-DCMAKE_PREFIX_PATH={prefix}"))
    run("cmake", "--build", build, limit_s=600).expect()
    run(build + "/start").expect(out="^1 rank on 1 host, solo")


def test_a_project_that_finds_torch_last(folder):
    prefix, build = install(folder), folder + "/build"
    expect_startable(build, beside_torch(build, "lockstep;Torch", f"-DCMAKE_PREFIX_PATH={prefix}"))


def find(build, prefix, arguments, *flags):
    return configure(build, SOURCE / "tests/system/consumer/find", "-DPACKAGE=lockstep", f"-DARGUMENTS={arguments}",
                     f"-DCMAKE_PREFIX_PATH={prefix}", *flags)


def test_a_project_with_another_libtorch_is_told(folder):
    prefix, other = install(folder), pathlib.Path(folder) / "other"
    header = other / "include/torch/headeronly/version.h"
    for directory in header.parent, other / "lib":
        directory.mkdir(parents=True)
    for library in "c10", "torch_cpu", "torch_cuda", "torch":
        (other / f"lib/lib{library}.so").touch()
    beside_torch(folder + "/build", "Torch;lockstep", f"-DCMAKE_PREFIX_PATH={prefix}", root=other).expect(
        status=1, err=r"find_package\(Torch\)\s+found\s+\S+/other/lib/libtorch_cpu.so,\s+but\s+Lockstep\s+has")
    header.write_text("#define TORCH_VERSION_MAJOR 2\n#define TORCH_VERSION_MINOR 99\n#define TORCH_VERSION_PATCH 1\n")
    find(folder + "/version", prefix, "REQUIRED", f"-DTorch_DIR={other}/share/cmake/Torch").expect(
        status=1, err=r"built\s+with\s+libtorch\s+2[.]\d+,\s+and\s+\S+/other\s+is\s+libtorch\s+2[.]99[.]1")


def test_components(folder):
    prefix = install(folder)
    find(folder + "/build", prefix, "REQUIRED;COMPONENTS;core;lockstep").expect()
    find(folder + "/build", prefix, "REQUIRED;COMPONENTS;core;gpu").expect(status=1, err=r"no\s+component\s+gpu")


def test_a_project_that_finds_torch_below(folder):
    """Where the targets of libtorch cannot be changed, it is told."""
    cuda = LIBTORCH / "lib/libtorch_cuda.so"
    configured = beside_torch(folder + "/build", "lockstep", f"-DCMAKE_PREFIX_PATH={install(folder)}", "-DBELOW=ON")
    configured.expect()
    missing = cuda.exists() and "not found" in subprocess.run(["ldd", cuda], capture_output=True, text=True).stdout
    assert ("such a program does not start" in " ".join(configured.err.split())) == missing, configured


def with_sources(build, packages, *flags):
    return beside_torch(build, packages, f"-DLOCKSTEP_SOURCE={SOURCE}", f"-DLOCKSTEP_TORCH_DIR={LIBTORCH}", *flags)


def test_a_project_with_the_sources_in_it(folder):
    for packages in "Torch;lockstep", "lockstep;Torch":
        build = f"{folder}/{packages[0]}"
        configured = with_sources(build, packages)
        expect_startable(build, configured)
        configured.expect(out="there is lockstep::core$")
        if (BUILD / "lib/liblockstep_c10d.so").exists():
            configured.expect(out="there is lockstep::c10d$")


def test_flags_of_a_project_with_the_sources_in_it(folder):
    """isfinite() works, symbols are exported and warnings are not errors, whatever flags the outer project has."""
    build = folder + "/build"
    with_sources(build, "lockstep", "-DCMAKE_CXX_FLAGS=-ffast-math -Wsign-conversion -Werror",
                 "-DCMAKE_CXX_VISIBILITY_PRESET=hidden",
                 "-DCMAKE_VISIBILITY_INLINES_HIDDEN=ON").expect()
    commands = run("ninja", "-C", build, "-t", "commands", "start").out
    ours = [line for line in commands.splitlines() if "-ffast-math" in line and "start.cpp" not in line]
    assert ours, commands[-3000:]
    for line in ours:
        assert re.search("-ffast-math .*-fno-fast-math ", line), line
        assert " -c " not in line or re.search("-Werror .*-Wno-error ", line), line
        assert not re.search("-fvisibility=hidden|-fvisibility-inlines-hidden", line), line
    with_sources(folder + "/refused", "lockstep", "-DCMAKE_CXX_FLAGS=-fno-rtti").expect(
        status=1, err=r"cannot\s+be\s+compiled\s+with\s+-fno-rtti")


def test_flags_of_a_program_that_are_refused(folder):
    program = pathlib.Path(folder) / "program.cpp"
    for header in "core/error.h", "core/shard.h", "train/run_log.h":
        program.write_text(f"#include <lockstep/{header}>\n")
        for flags, said in (["-std=c++20"], ""), (["-std=c++20", "-D_GLIBCXX_ASSERTIONS"], ""), (
                ["-std=c++20", "-D_GLIBCXX_DEBUG"], "use _GLIBCXX_ASSERTIONS"), (["-std=c++17"], r"give -std=c\+\+20"):
            run("c++", *flags, "-fsyntax-only", f"-I{SOURCE / 'include'}", program).expect(
                status=1 if said else 0, err=said)


if __name__ == "__main__":
    run_cases([test_packages_and_what_is_built_with_them, test_a_project_that_finds_torch_first,
               test_a_project_that_finds_torch_last, test_a_project_with_another_libtorch_is_told,
               test_components, test_a_project_that_finds_torch_below, test_a_project_with_the_sources_in_it,
               test_flags_of_a_project_with_the_sources_in_it, test_flags_of_a_program_that_are_refused])
