"""docs/environment.md names each environment variable that the sources read or set, and none that they do not.

python3 environment.py SOURCE_DIR BUILD_DIR
"""
import pathlib
import re
import sys

SOURCE = pathlib.Path(sys.argv[1]).resolve()
CALL = re.compile(r"\b(?:env_text|env_int|getenv|setenv|unsetenv|required|env_number)\(\s*\"([A-Za-z_0-9]+)\"")
# A literal that is a variable's name wherever it stands, by how such names begin.
KNOWN = re.compile(r"\"((?:LOCKSTEP|TORCH_?ELASTIC|OMP|MASTER|WORLD|LOCAL_RANK|LOCAL_WORLD|GROUP|ROLE|SLURM|SLURMD|"
                   r"PMI|PMIX|JSM|OMPI|MPI|MPIR|MV2|CUDA|CUBLAS|MKL|ONEDNN|NCCL|GLOO|ACCELERATE|FSDP|PET|LD|CONDA)"
                   r"_(?:MCA_orte_)?(?:[A-Z0-9_]*|[a-z_]*_uri))=?\"")

used = {}
for folder in "src", "tools", "include":
    for file in sorted((SOURCE / folder).rglob("*")):
        if file.suffix not in (".h", ".cpp", ".inl"):
            continue
        for number, line in enumerate(file.read_text().splitlines(), 1):
            for name in CALL.findall(line) + KNOWN.findall(line):
                used.setdefault(name, f"{file.relative_to(SOURCE)}:{number}")
for name in "scripts/setup.sh", "cmake/FindLockstepTorch.cmake":
    for found in re.findall(r"\$\{?(?:ENV\{)?(LOCKSTEP_[A-Z_]+)", (SOURCE / name).read_text()):
        if found != "LOCKSTEP_TORCH_DIR":  # a variable of CMake
            used.setdefault(found, name)

named, faults = {}, []
for line in (SOURCE / "docs/environment.md").read_text().splitlines():
    if not line.startswith("| `"):
        continue
    for name in re.findall(r"`(\w+)`", line.split("|")[1]):
        if name in named:
            faults.append(f"docs/environment.md names {name} twice")
        named[name] = line
faults += [f"docs/environment.md does not name {name} ({place})"
           for name, place in sorted(used.items()) if name not in named]
faults += [f"docs/environment.md names {name}, which the sources do not" for name in sorted(set(named) - set(used))]

print("\n".join(faults) or f"docs/environment.md names the {len(used)} variables of the sources")
sys.exit(1 if faults else 0)
