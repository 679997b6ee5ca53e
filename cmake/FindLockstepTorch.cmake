# libtorch >= the asked version as LockstepTorch::cpu, from the first of
#   1. LOCKSTEP_TORCH_DIR / $LOCKSTEP_TORCH / LockstepTorch_ROOT: a folder that holds torch/ (an unpacked wheel,
#      site-packages) or is a libtorch
#   2. Torch_DIR, Torch_ROOT or CMAKE_PREFIX_PATH, of CMake or the environment: the user's own libtorch
#   3. the one that this build folder already has
#   4. .deps/libtorch of this project, put there by scripts/setup.sh
#   5. LockstepTorch_HINT, of an installed Lockstep
#   6. a Python in PATH that has torch
# The targets point straight at libtorch_cpu.so and libc10.so: the wheel's own TorchConfig wants a whole CUDA toolkit,
# even for a CPU program. LockstepTorch_CUDA tells whether libtorch_cuda.so is there, too.
set(_reason "run scripts/setup.sh, or give your own libtorch with -DTorch_DIR=... or -DCMAKE_PREFIX_PATH=...")
set(_folders "")
set(_named ${LOCKSTEP_TORCH_DIR} $ENV{LOCKSTEP_TORCH} ${LockstepTorch_ROOT})
list(FILTER _named EXCLUDE REGEX "-NOTFOUND$")
if(_named)  # names nothing but a libtorch, so another one is not what was asked for
  list(GET _named 0 _dir)
  list(APPEND _folders "${_dir}/torch" "${_dir}")
  set(_nothing "neither ${_dir} nor ${_dir}/torch has lib/libtorch_cpu.so")
  string(APPEND _nothing ", and it was named by LOCKSTEP_TORCH_DIR, LOCKSTEP_TORCH or LockstepTorch_ROOT")
else()
  foreach(_dir ${Torch_DIR} $ENV{Torch_DIR})
    if(_dir)
      list(APPEND _folders "${_dir}/../../..")  # of <libtorch>/share/cmake/Torch
    endif()
  endforeach()
  string(REPLACE ":" ";" _env "$ENV{CMAKE_PREFIX_PATH}")
  foreach(_dir ${Torch_ROOT} $ENV{Torch_ROOT} ${CMAKE_PREFIX_PATH} ${_env})
    list(APPEND _folders "${_dir}/torch" "${_dir}")
    if(EXISTS "${_dir}/Torch")  # torch.utils.cmake_prefix_path: <libtorch>/share/cmake
      list(APPEND _folders "${_dir}/../..")
    endif()
  endforeach()
  list(APPEND _folders ${LockstepTorch_FOLDER})
  list(APPEND _folders "${PROJECT_SOURCE_DIR}/.deps/libtorch/torch" "${PROJECT_SOURCE_DIR}/.deps/libtorch" ${LockstepTorch_HINT})
endif()
set(_root "")
foreach(_dir ${_folders})
  get_filename_component(_dir "${_dir}" ABSOLUTE BASE_DIR "${CMAKE_SOURCE_DIR}")
  if(NOT _root AND EXISTS "${_dir}/lib/libtorch_cpu.so")
    set(_root "${_dir}")
  endif()
endforeach()
if(_named AND NOT _root)
  set(_reason "${_nothing}")
elseif(NOT _root)
  find_program(_python NAMES python3 NO_CACHE)
  if(_python)
    execute_process(COMMAND ${_python} -c
      "import importlib.util as u, os; print(os.path.dirname(u.find_spec('torch').origin))"
      OUTPUT_VARIABLE _dir OUTPUT_STRIP_TRAILING_WHITESPACE ERROR_QUIET)
    if(_dir AND EXISTS "${_dir}/lib/libtorch_cpu.so")
      set(_root "${_dir}")
    endif()
  endif()
endif()
unset(LockstepTorch_LIBRARY_DIR)
unset(LockstepTorch_VERSION)
if(_root)
  set(LockstepTorch_FOLDER "${_root}" CACHE INTERNAL "The libtorch that was found")
  set(LockstepTorch_LIBRARY_DIR "${_root}/lib")
endif()
foreach(_header torch/headeronly/version.h torch/csrc/api/include/torch/version.h)
  if(NOT LockstepTorch_VERSION AND EXISTS "${_root}/include/${_header}")
    file(STRINGS "${_root}/include/${_header}" _v REGEX "#define TORCH_VERSION_(MAJOR|MINOR|PATCH)")
    string(REGEX REPLACE ".*MAJOR ([0-9]+).*MINOR ([0-9]+).*PATCH ([0-9]+).*" "\\1.\\2.\\3" LockstepTorch_VERSION "${_v}")
  endif()
endforeach()

include(FindPackageHandleStandardArgs)
find_package_handle_standard_args(LockstepTorch REQUIRED_VARS LockstepTorch_LIBRARY_DIR VERSION_VAR LockstepTorch_VERSION
  REASON_FAILURE_MESSAGE "${_reason}")
if(LockstepTorch_FOUND AND NOT TARGET LockstepTorch::cpu)
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
