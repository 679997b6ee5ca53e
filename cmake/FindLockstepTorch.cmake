# libtorch >= the asked version as LockstepTorch::cpu, from the first of
#   1. LOCKSTEP_TORCH_DIR / $LOCKSTEP_TORCH: a folder that holds torch/ (an unpacked wheel, site-packages, a libtorch's parent)
#   2. Torch_DIR or CMAKE_PREFIX_PATH: the user's own libtorch
#   3. .deps/libtorch of this project, put there by scripts/setup.sh
#   4. a Python in PATH that has torch
# The targets point straight at libtorch_cpu.so and libc10.so: the wheel's own TorchConfig wants a whole CUDA toolkit,
# even for a CPU program. LockstepTorch_CUDA tells whether libtorch_cuda.so is there, too.
set(_hints ${LOCKSTEP_TORCH_DIR} $ENV{LOCKSTEP_TORCH})
foreach(_dir ${Torch_DIR} $ENV{Torch_DIR})
  list(APPEND _hints ${_dir}/../../../.. ${_dir}/../../..)  # <root>/torch/share/cmake/Torch, <root>/share/cmake/Torch
endforeach()
foreach(_dir ${CMAKE_PREFIX_PATH} $ENV{CMAKE_PREFIX_PATH})
  list(APPEND _hints ${_dir} ${_dir}/.. ${_dir}/../..)
endforeach()
list(APPEND _hints ${PROJECT_SOURCE_DIR}/.deps/libtorch ${LockstepTorch_HINT})
find_path(LockstepTorch_ROOT NAMES torch/lib/libtorch_cpu.so lib/libtorch_cpu.so HINTS ${_hints} NO_DEFAULT_PATH)
if(NOT LockstepTorch_ROOT)
  find_program(_python NAMES python3)
  if(_python)
    execute_process(COMMAND ${_python} -c
      "import importlib.util as u, os; print(os.path.dirname(os.path.dirname(u.find_spec('torch').origin)))"
      OUTPUT_VARIABLE _site OUTPUT_STRIP_TRAILING_WHITESPACE ERROR_QUIET)
    find_path(LockstepTorch_ROOT NAMES torch/lib/libtorch_cpu.so HINTS ${_site} NO_DEFAULT_PATH)
  endif()
endif()
if(EXISTS "${LockstepTorch_ROOT}/torch/lib/libtorch_cpu.so")
  set(_root "${LockstepTorch_ROOT}/torch")
else()
  set(_root "${LockstepTorch_ROOT}")
endif()
foreach(_header torch/headeronly/version.h torch/csrc/api/include/torch/version.h)
  if(NOT LockstepTorch_VERSION AND EXISTS "${_root}/include/${_header}")
    file(STRINGS "${_root}/include/${_header}" _v REGEX "#define TORCH_VERSION_(MAJOR|MINOR|PATCH)")
    string(REGEX REPLACE ".*MAJOR ([0-9]+).*MINOR ([0-9]+).*PATCH ([0-9]+).*" "\\1.\\2.\\3" LockstepTorch_VERSION "${_v}")
  endif()
endforeach()

include(FindPackageHandleStandardArgs)
find_package_handle_standard_args(LockstepTorch REQUIRED_VARS LockstepTorch_ROOT VERSION_VAR LockstepTorch_VERSION
  REASON_FAILURE_MESSAGE "run scripts/setup.sh, or give your own libtorch with -DTorch_DIR=... or -DCMAKE_PREFIX_PATH=...")
if(LockstepTorch_FOUND AND NOT TARGET LockstepTorch::cpu)
  set(LockstepTorch_LIBRARY_DIR "${_root}/lib")
  set(LockstepTorch_CUDA OFF)
  if(EXISTS "${_root}/lib/libtorch_cuda.so")
    set(LockstepTorch_CUDA ON)
  endif()
  add_library(LockstepTorch::c10 SHARED IMPORTED)
  set_target_properties(LockstepTorch::c10 PROPERTIES IMPORTED_LOCATION "${_root}/lib/libc10.so"
    INTERFACE_INCLUDE_DIRECTORIES "${_root}/include")
  add_library(LockstepTorch::cpu SHARED IMPORTED)
  set_target_properties(LockstepTorch::cpu PROPERTIES IMPORTED_LOCATION "${_root}/lib/libtorch_cpu.so"
    INTERFACE_INCLUDE_DIRECTORIES "${_root}/include;${_root}/include/torch/csrc/api/include"
    INTERFACE_COMPILE_DEFINITIONS "USE_DISTRIBUTED;USE_C10D_GLOO;USE_RPC;USE_TENSORPIPE"
    INTERFACE_COMPILE_FEATURES cxx_std_20
    # libtorch_cpu names CUDA libraries that a CPU program never loads.
    INTERFACE_LINK_OPTIONS "LINKER:--allow-shlib-undefined"
    INTERFACE_LINK_LIBRARIES LockstepTorch::c10)
endif()
mark_as_advanced(LockstepTorch_ROOT)
