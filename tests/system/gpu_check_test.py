"""The bundle for a machine with a GPU and no network, and scripts/gpu_check.sh, on a machine without a GPU.

python3 gpu_check_test.py SOURCE_DIR BUILD_DIR
"""
import json
import os
import pathlib
import re
import subprocess
import sys
import tarfile
import time

from support.program import run, run_cases

SOURCE, BUILD = (pathlib.Path(argument).resolve() for argument in sys.argv[1:3])
CHECK = SOURCE / "scripts/gpu_check.sh"
PATIENT = ("--patience", "20")  # the machine may be busy
PROJECT = """cmake_minimum_required(VERSION 3.25)
project(finds CXX)
list(APPEND CMAKE_PREFIX_PATH ${BUNDLE}/.deps/debian/usr)
set(CMAKE_FIND_USE_CMAKE_SYSTEM_PATH OFF)
set(CMAKE_FIND_USE_SYSTEM_ENVIRONMENT_PATH OFF)
find_package(Threads REQUIRED)
foreach(package fmt nlohmann_json OpenSSL CLI11 yaml-cpp ZLIB JPEG PNG GTest)
  find_package(${package} REQUIRED)
endforeach()
file(WRITE ${CMAKE_BINARY_DIR}/main.cpp "
#include <fmt/format.h>
#include <gmock/gmock.h>
#include <CLI/CLI.hpp>
#include <nlohmann/json.hpp>
#include <openssl/ssl.h>
#include <xxhash.h>
#include <yaml-cpp/yaml.h>
#include <zlib.h>
#include <cstdio>
#include <jpeglib.h>
#include <png.h>
int main() {
  jpeg_error_mgr errors;
  fmt::print(\\"{} {} {}\\\\n\\", zlibVersion(), png_libpng_ver, YAML::Load(\\"a: 1\\")[\\"a\\"].as<int>());
  return SSL_CTX_new(TLS_method()) == nullptr || EVP_MD_CTX_new() == nullptr || png_access_version_number() == 0 ||
         jpeg_std_error(&errors) != &errors;
}
")
"""


def bundle_in(folder):
    file = pathlib.Path(folder, "bundle.tar.gz")
    run(SOURCE / "scripts/gpu_bundle.sh", file).expect(out=r"^\[gpu-bundle\] .*bundle[.]tar[.]gz: \d+ KiB")
    return file


def bundle_has_what_a_build_needs(folder):
    file = bundle_in(folder)
    assert file.stat().st_size < 64 << 20, file.stat().st_size
    with tarfile.open(file) as tar:
        tar.extractall(folder)
    top = pathlib.Path(folder, "lockstep-gpu")
    for name in ("CMakeLists.txt", "src/comm/group.cpp", "tests/device/on_gpu/main.cpp", "scripts/gpu_check.sh",
                 "scripts/gpu_figures.py", "benchmarks/train_step.cpp", "benchmarks/peers/transformer.py",
                 ".deps/revision.txt"):
        assert (top / name).exists(), f"no {name} in the bundle"
    assert os.access(top / "scripts/gpu_check.sh", os.X_OK)
    usr = top / ".deps/debian/usr"
    for header in ("openssl/configuration.h", "zconf.h", "jconfig.h", "xxhash.h", "png.h"):
        assert (usr / "include" / header).exists(), f"no {header} in the bundle"
    for link in (path for path in usr.rglob("*") if path.is_symlink()):
        assert link.resolve().is_relative_to(usr), f"{link} leads out of the bundle, to {link.resolve()}"
    for library in (usr / "lib/x86_64-linux-gnu").glob("*.so*"):
        versions = re.findall(r"\bGLIBC_2[.](\d+)", run("objdump", "-T", library, LC_ALL="C").out)
        assert max(map(int, versions), default=0) <= 36, f"{library} needs a glibc newer than Debian 12's"


def bundle_is_found_by_cmake_where_nothing_else_is(folder):
    """All from the bundle: nothing from this machine's own packages."""
    with tarfile.open(bundle_in(folder)) as tar:
        tar.extractall(folder)
    top = pathlib.Path(folder, "lockstep-gpu")
    usr = top / ".deps/debian/usr"
    pathlib.Path(folder, "CMakeLists.txt").write_text(PROJECT.replace("${BUNDLE}", str(top)))
    run("cmake", "-S", folder, "-B", folder + "/build", "-G", "Ninja").expect()
    cache = pathlib.Path(folder, "build/CMakeCache.txt").read_text()
    found = re.findall(r"^(fmt_DIR|nlohmann_json_DIR|CLI11_DIR|yaml-cpp_DIR|GTest_DIR|"
                       r"ZLIB_LIBRARY_RELEASE|ZLIB_INCLUDE_DIR|JPEG_LIBRARY_RELEASE|JPEG_INCLUDE_DIR|"
                       r"PNG_LIBRARY_RELEASE|PNG_PNG_INCLUDE_DIR|OPENSSL_INCLUDE_DIR|OPENSSL_SSL_LIBRARY|"
                       r"OPENSSL_CRYPTO_LIBRARY):\w+=(.*)$", cache, re.M)
    assert len(found) == 14, found
    for name, path in found:
        assert path.startswith(str(usr)), f"{name} is {path}, outside of the bundle"
    # It links and starts, with the libraries of the bundle.
    libraries = usr / "lib/x86_64-linux-gnu"
    links = ["-lfmt", "-lyaml-cpp", "-lssl", "-lcrypto", "-lpng", "-lz", "-ljpeg"]
    run("g++", "-std=c++20", "-isystem", usr / "include",
        folder + "/build/main.cpp", "-o", folder + "/main",
        f"-L{libraries}", f"-Wl,-rpath,{libraries}", *links).expect()
    needs = run("ldd", folder + "/main").out
    for name in ("fmt", "yaml-cpp", "ssl", "crypto", "png16", "z", "jpeg"):
        assert re.search(rf"lib{name}[.]so[.\d]* => {re.escape(str(usr))}", needs), needs
    run(folder + "/main").expect(out=r"^\d[.\d]+ \d[.\d]* 1\n")


# scripts/gpu_check.sh


def checked(folder, *arguments, **variables):
    outcome = run(CHECK, "--out", folder + "/out", *arguments, limit_s=1500, **variables)
    results = pathlib.Path(folder, "out/results.json")
    return outcome, json.loads(results.read_text()) if results.exists() else None


def stages_of(results):
    return {row["name"]: row for row in results["stages"]}


def without_gpu_it_says_so(folder):
    tools = pathlib.Path(folder, "tools")
    tools.mkdir()
    (tools / "nvidia-smi").write_text("#!/bin/sh\necho NVIDIA-SMI has failed\nexit 9\n")
    (tools / "nvidia-smi").chmod(0o755)
    outcome, results = checked(folder, *PATIENT, PATH=f"{tools}:{os.environ['PATH']}")
    outcome.expect(status=1, out=r"environment: FAILED.*this machine has no NVIDIA GPU \(nvidia-smi does not run\)")
    assert [row["status"] for row in results["stages"]] == ["FAILED"], results
    assert "ended with 9" in results["machine"]["driver"], results["machine"]
    assert not pathlib.Path(folder, "out/build.log").exists()


def an_unknown_stage_is_refused(folder):
    outcome, results = checked(folder, "one_rank", "nonsense")
    outcome.expect(status=2, err="no stage is called nonsense: there are environment, build, one_rank")
    assert results is None


def checks_are_right_on_the_cpu(folder):
    outcome, results = checked(folder, *PATIENT, "--cpu", "--build", BUILD, "one_rank", "sanitizer")
    outcome.expect(out=[r"one_rank: good", r"sanitizer: not run.*GPUs only"])
    names = run(BUILD / "bin/on_gpu", "--list").out.split()
    assert len(names) > 25, names
    log = pathlib.Path(folder, "out/one_rank.log").read_text()
    for name in names:
        assert f"good {name} (" in log, f"{name} did not run:\n{log}"


FAKE = r"""#!/bin/sh
# Checks a to e: b fails, c ends the program; with HANG in place of that it stays.
case "$*" in *--list*) echo a b c d e; exit 0;; esac
status=0
for word; do
  case $word in
    a|d|e) echo "good $word (1 ms)" ;;
    b) echo "FAILED b: 1 is not 2"; status=1 ;;
    c) [ -z "$HANG" ] || sleep 100000; exit 7 ;;
  esac
done
exit $status
"""


def fake_build(folder):
    tools = pathlib.Path(folder, "build/bin")
    tools.mkdir(parents=True)
    (tools / "on_gpu").write_text(FAKE)
    (tools / "lockstep").write_text('#!/bin/sh\nshift 3\nexec "$@"\n')
    for name in ("on_gpu", "lockstep"):
        (tools / name).chmod(0o755)
    (tools.parent / "lib").mkdir()
    (tools.parent / "lib/liblockstep.so").write_bytes(b"cuda_ipc")
    return tools.parent


def checks_after_one_that_ends_the_program_run(folder):
    outcome, results = checked(folder, *PATIENT, "--cpu", "--build", fake_build(folder), "one_rank", "sanitizer")
    outcome.expect(status=1)
    stages = stages_of(results)
    assert stages["one_rank"]["status"] == "FAILED"
    why = stages["one_rank"]["why"]
    assert "b: 1 is not 2" in why and "c: " in why, why
    assert not re.search(r"\b[ade]: ", why), why
    log = pathlib.Path(folder, "out/one_rank.log").read_text()
    assert "good d" in log and "good e" in log, log
    assert stages["sanitizer"]["status"] == "not run"


def a_stage_that_hangs_ends_with_its_time(folder):
    outcome, results = checked(folder, "--patience", "0.02", "--cpu", "--build", fake_build(folder), "one_rank",
                               "sanitizer", HANG="1")
    outcome.expect(status=1)
    stages = stages_of(results)
    assert stages["one_rank"]["status"] == "FAILED", stages
    assert stages["sanitizer"]["status"] == "not run", stages
    left = subprocess.run(["pgrep", "-f", folder], capture_output=True, text=True).stdout.split()
    assert not left, f"processes are left: {left}"


def what_it_runs_ends_with_it(folder):
    environment = os.environ | {"HANG": "1"}
    command = [CHECK, "--out", folder + "/out", *PATIENT, "--cpu", "--build", fake_build(folder), "one_rank"]
    check = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    log = pathlib.Path(folder, "out/.one_rank.output")
    while not (log.exists() and "FAILED b" in log.read_text()):
        assert check.poll() is None, "it ended by itself"
        time.sleep(0.01)
    check.terminate()
    assert check.wait() == 143, check.returncode
    left = subprocess.run(["pgrep", "-f", folder], capture_output=True, text=True).stdout.split()
    assert not left, f"processes are left: {left}"


run_cases([bundle_has_what_a_build_needs, bundle_is_found_by_cmake_where_nothing_else_is, without_gpu_it_says_so,
           an_unknown_stage_is_refused, checks_after_one_that_ends_the_program_run,
           a_stage_that_hangs_ends_with_its_time, what_it_runs_ends_with_it, checks_are_right_on_the_cpu])
