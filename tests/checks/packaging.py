"""Holds the recipes in packaging/ to the project: one version, files that exist, instructions that there are.

python3 packaging.py SOURCE_DIR BUILD_DIR
"""
import ast
import json
import pathlib
import re
import sys

INSTRUCTIONS = {"FROM", "WORKDIR", "COPY", "RUN", "ENV", "CMD", "ENTRYPOINT", "ARG", "LABEL", "EXPOSE", "USER"}


def instructions(text):
    """(name, arguments), with continued lines joined."""
    lines = [line for line in text.splitlines() if line.strip() and not line.startswith("#")]
    for line in re.sub(r"\\\n", " ", "\n".join(lines)).splitlines():
        name, _, rest = line.partition(" ")
        yield name, rest.split()


def dockerfile_faults(source):
    stages = set()
    for name, words in instructions((source / "packaging/Dockerfile").read_text()):
        if name not in INSTRUCTIONS:
            yield f"Dockerfile: no instruction {name}"
        if name == "FROM" and "AS" in words:
            stages.add(words[-1])
        if name != "COPY":
            continue
        stage = [word.removeprefix("--from=") for word in words if word.startswith("--from=")]
        if stage and stage[0] not in stages:
            yield f"Dockerfile: no stage {stage[0]}"
        for file in [] if stage else words[:-1]:
            if not (source / file).exists():
                yield f"Dockerfile: COPY {file}, which there is not"


def faults(source):
    version = re.search(r"project\(lockstep VERSION ([\d.]+)", (source / "CMakeLists.txt").read_text())[1]
    yield from dockerfile_faults(source)
    port = json.loads((source / "packaging/vcpkg/ports/lockstep/vcpkg.json").read_text())
    if port["version"] != version:
        yield f"vcpkg.json: version {port['version']}, the project has {version}"
    recipe = ast.parse((source / "packaging/conan/conanfile.py").read_text())
    methods = {node.name for node in ast.walk(recipe) if isinstance(node, ast.FunctionDef)}
    yield from (f"conanfile.py: no {name}()" for name in ("set_version", "generate", "build", "package")
                if name not in methods)
    # What the build looks for, the recipes bring.
    sought = re.findall(r"find_package\((\w[\w-]*) REQUIRED", (source / "cmake/LockstepBuild.cmake").read_text())
    needs = set(sought) - {"Threads"}
    names = {"fmt": "fmt", "nlohmann_json": "nlohmann", "OpenSSL": "openssl", "CLI11": "cli11",
             "yaml-cpp": "yaml-cpp", "ZLIB": "zlib", "JPEG": "jpeg", "PNG": "png"}
    conan = (source / "packaging/conan/conanfile.py").read_text()
    brought = [dependency if isinstance(dependency, str) else dependency["name"] for dependency in port["dependencies"]]
    for need in sorted(needs):
        if need not in names:
            yield f"{need} is needed by the build and unknown to this check"
        elif names[need] not in conan:
            yield f"conanfile.py: requires nothing for {need}"
        elif not any(names[need] in dependency for dependency in brought):
            yield f"vcpkg.json: depends on nothing for {need}"


def main():
    found = list(faults(pathlib.Path(sys.argv[1])))
    for fault in found:
        print(fault)
    sys.exit(1 if found else 0)


if __name__ == "__main__":
    main()
