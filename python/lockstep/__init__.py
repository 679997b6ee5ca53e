"""Lockstep as a backend of torch.distributed: init_process_group("lockstep").

Installed, the package is found by its name through an entry point, and no import is needed.
"""
import atexit
import pathlib

import torch  # first: its libtorch_cpu.so is then the one that Lockstep's libraries get
import torch.distributed as dist


def cmake_prefix_path():
    """For CMAKE_PREFIX_PATH of C++ projects that say find_package(lockstep)."""
    return str(pathlib.Path(__file__).parent)


def _checked(module):
    built, here = module.torch_version.split("."), torch.__version__.split(".")
    if built[:2] != here[:2]:
        raise ImportError(f"this lockstep was built for torch {built[0]}.{built[1]}, and this is torch "
                          f"{torch.__version__}: install the two that belong together")
    return module


def register():
    """Makes "lockstep" a backend of torch.distributed for tensors on the CPU; what the entry point calls."""
    if "LOCKSTEP" in dist.Backend._plugins:
        return
    from . import _C
    module = _checked(_C)

    def create(asked, _):
        # The list is empty for the default group.
        ranks = asked.global_ranks_in_group or range(asked.group_size)
        return module.create(asked.store, asked.group_rank, list(ranks), asked.timeout)

    dist.Backend.register_backend("lockstep", create, extended_api=True, devices=["cpu"])
    # Threads that take the interpreter's lock while it ends would abort the process.
    atexit.register(module.shut_all_down)


if dist.is_available():
    register()
