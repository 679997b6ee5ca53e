"""Lockstep as a backend of torch.distributed: init_process_group("lockstep").

Installed, the package is found by its name through an entry point, and no import is needed.
"""
import atexit
import pathlib
import sys

import torch  # first: its libtorch_cpu.so is then the one that Lockstep's libraries get
import torch.distributed as dist


def cmake_prefix_path():
    """For CMAKE_PREFIX_PATH of C++ projects that say find_package(lockstep)."""
    return str(pathlib.Path(__file__).parent)


def _check_versions():
    """Before the binding is loaded, since the linker would only say which symbol another version lacks."""
    here = {"torch": torch.__version__, "Python": ".".join(map(str, sys.version_info[:3]))}
    for name, built in ("torch", "@LOCKSTEP_C10D_VERSION@"), ("Python", "@LOCKSTEP_PYTHON_VERSION@"):
        if built.split(".") != here[name].split(".")[:2]:
            raise ImportError(f"this lockstep was built for {name} {built}, and this is {name} {here[name]}: "
                              "install the two that belong together")


def register():
    """Makes "lockstep" a backend of torch.distributed for tensors on the CPU; what the entry point calls."""
    if "LOCKSTEP" in dist.Backend._plugins:
        return
    _check_versions()
    from . import _C

    def create(asked, _):
        # The list is empty for the default group.
        ranks = asked.global_ranks_in_group or range(asked.group_size)
        return _C.create(asked.store, asked.group_rank, list(ranks), asked.timeout)

    dist.Backend.register_backend("lockstep", create, extended_api=True, devices=["cpu"])
    # Threads that take the interpreter's lock while it ends would abort the process.
    atexit.register(_C.shut_all_down)


if dist.is_available():
    register()
