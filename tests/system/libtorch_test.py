"""Which libtorch CMake takes, and which it refuses. The libtorches are empty files: nothing is compiled.

python3 libtorch_test.py SOURCE_DIR BUILD_DIR
"""
import pathlib
import re
import shutil
import sys

from support.program import run, run_cases

SOURCE = pathlib.Path(sys.argv[1]).resolve()
NOTHING = {"Torch_DIR": None, "Torch_ROOT": None, "CMAKE_PREFIX_PATH": None}  # of the developer's own environment


def libtorch(folder, version="2.15.0"):
    """A folder that looks like this libtorch to CMake."""
    folder = pathlib.Path(folder)
    header = folder / "include/torch/headeronly/version.h"
    for directory in header.parent, folder / "lib", folder / "share/cmake/Torch":
        directory.mkdir(parents=True)
    for library in "c10", "torch_cpu":
        (folder / f"lib/lib{library}.so").touch()
    header.write_text("".join(f"#define TORCH_VERSION_{part} {number}\n"
                              for part, number in zip(("MAJOR", "MINOR", "PATCH"), version.split("."))))
    return folder


def project(folder):
    """A project that finds libtorch as Lockstep does, and has one in .deps."""
    shutil.copytree(SOURCE / "tests/system/consumer/find", folder + "/project")
    libtorch(folder + "/project/.deps/libtorch/torch")
    return folder + "/project"


def configure(project, build, *flags, **environment):
    return run("cmake", "-S", project, "-B", build, "-G", "Ninja", "-DPACKAGE=LockstepTorch",
               "-DARGUMENTS=2.11;REQUIRED", f"-DMODULES={SOURCE}/cmake", *flags, **NOTHING | environment)


def expect(taken, configured):
    configured.expect(out=f"libtorch [0-9.]+ in {re.escape(str(taken))}/lib$")


def test_the_libtorch_of_the_project_where_none_is_named(folder):
    mine = project(folder)
    expect(mine + "/.deps/libtorch/torch", configure(mine, folder + "/build"))
    expect(mine + "/.deps/libtorch/torch", configure(mine, folder + "/prefix", f"-DCMAKE_PREFIX_PATH={folder}"))


def test_a_libtorch_that_is_named_comes_first(folder):
    mine, named = project(folder), libtorch(folder + "/a folder (1)/libtorch")
    wheel = libtorch(folder + "/a folder (1)/site-packages/torch")
    libtorch(named.parent / "torch")  # beside both, and not named
    config = "share/cmake/Torch"
    for number, (taken, flags, environment) in enumerate([
            (named, [f"-DLOCKSTEP_TORCH_DIR={named}"], {}), (wheel, [f"-DLOCKSTEP_TORCH_DIR={wheel.parent}"], {}),
            (named, [], {"LOCKSTEP_TORCH": str(named)}), (wheel, [], {"LOCKSTEP_TORCH": str(wheel.parent)}),
            (wheel, [], {"LOCKSTEP_TORCH": str(wheel)}), (named, [f"-DLockstepTorch_ROOT={named}"], {}),
            (named, [f"-DTorch_DIR={named / config}"], {}), (wheel, [f"-DTorch_DIR={wheel / config}"], {}),
            (named, [], {"Torch_DIR": str(named / config)}), (named, [f"-DTorch_ROOT={named}"], {}),
            (named, [f"-DCMAKE_PREFIX_PATH={folder};{named}"], {}),
            (wheel, [f"-DCMAKE_PREFIX_PATH={wheel.parent}"], {}),
            (wheel, [f"-DCMAKE_PREFIX_PATH={wheel}/share/cmake"], {}),  # torch.utils.cmake_prefix_path
            (named, [], {"CMAKE_PREFIX_PATH": f"{folder}:{named}"})]):
        expect(taken, configure(mine, f"{folder}/build{number}", *flags, **environment))


def test_one_that_is_named_later_in_the_same_build_folder(folder):
    mine, build = project(folder), folder + "/build"
    first, second = (libtorch(f"{folder}/{name}") for name in ("first", "second"))
    expect(mine + "/.deps/libtorch/torch", configure(mine, build))
    expect(first, configure(mine, build, f"-DTorch_DIR={first}/share/cmake/Torch"))
    expect(second, configure(mine, build, f"-DLOCKSTEP_TORCH_DIR={second}"))


def test_a_name_in_the_environment_holds_for_the_build_folder(folder):
    """Ninja runs CMake again when a file has changed, perhaps from another shell."""
    mine, build, named = project(folder), folder + "/build", libtorch(folder + "/named")
    expect(named, configure(mine, build, LOCKSTEP_TORCH=str(named)))
    expect(named, configure(mine, build))


def test_a_folder_without_one_is_refused(folder):
    mine, empty = project(folder), folder + "/empty"
    configure(mine, folder + "/build", f"-DLOCKSTEP_TORCH_DIR={empty}").expect(
        status=1, err=rf"neither {empty} nor\s+{empty}/torch\s+has\s+lib/libtorch_cpu.so")
    run("cmake", "-S", SOURCE, "-B", folder + "/build2", "-G", "Ninja", f"-DLOCKSTEP_TORCH={empty}").expect(
        status=1, err=rf"LOCKSTEP_TORCH='{empty}'\s+is\s+neither\s+ON\s+nor\s+OFF(.|\n)*-DLOCKSTEP_TORCH_DIR=")


def test_one_that_is_too_old_is_refused(folder):
    mine, old = project(folder), libtorch(folder + "/old", "2.10.0")
    configure(mine, folder + "/build", f"-DCMAKE_PREFIX_PATH={old}").expect(
        status=1, err=r'unsuitable\s+version\s+"2.10.0"(.|\n)*at\s+least\s+"2.11"')


def test_setup_fetches_none_where_the_environment_names_one(folder):
    """CMAKE_PREFIX_PATH is often there for other packages; the project's own counts as installed here."""
    for name in "deps/apt.txt", "deps/libtorch.txt", ".deps/libtorch/installed.txt", "scripts/setup.sh":
        (pathlib.Path(folder) / name).parent.mkdir(parents=True, exist_ok=True)
        (pathlib.Path(folder) / name).write_text("# nothing\n")
    shutil.copy(SOURCE / "scripts/setup.sh", folder + "/scripts")
    named, wheel = libtorch(folder + "/a folder/named"), libtorch(folder + "/a folder/site-packages/torch")
    given = "using the libtorch given"
    for environment, is_given in [
            ({"LOCKSTEP_TORCH": str(named)}, True), ({"Torch_DIR": f"{named}/share/cmake/Torch"}, True),
            ({"Torch_ROOT": str(named)}, True), ({"CMAKE_PREFIX_PATH": f"{folder}:{named}"}, True),
            ({"CMAKE_PREFIX_PATH": str(wheel.parent)}, True), ({"CMAKE_PREFIX_PATH": f"{wheel}/share/cmake"}, True),
            ({"CMAKE_PREFIX_PATH": f"/opt/ros:{folder}"}, False), ({"Torch_DIR": folder}, False), ({}, False)]:
        done = run("bash", folder + "/scripts/setup.sh", **NOTHING | {"LOCKSTEP_TORCH": None} | environment)
        done.expect()
        assert (given in done.err) == is_given, (environment, done.err)


if __name__ == "__main__":
    run_cases([test_the_libtorch_of_the_project_where_none_is_named, test_a_libtorch_that_is_named_comes_first,
               test_one_that_is_named_later_in_the_same_build_folder,
               test_a_name_in_the_environment_holds_for_the_build_folder, test_a_folder_without_one_is_refused,
               test_one_that_is_too_old_is_refused, test_setup_fetches_none_where_the_environment_names_one])
