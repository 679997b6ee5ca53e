# A project that has find_package(Torch) and ${TORCH_LIBRARIES} beside Lockstep, before it or after.
#
# TorchConfig links libtorch_cuda.so into every program. Where one of CUDA's libraries is not installed such a program
# ends before main(), though it would train on the CPU. Lockstep's programs do not link it: it is loaded where there
# are GPUs.

# lockstep_not_installed(OUT LIBTORCH_CUDA): a library that it needs and that is not installed, or nothing.
function(lockstep_not_installed out torch_cuda)
  execute_process(COMMAND ldd ${torch_cuda} OUTPUT_VARIABLE needs ERROR_QUIET)
  string(REGEX MATCH "[^ \t\n]+ => not found" missing "${needs}")
  string(REPLACE " => not found" "" missing "${missing}")
  set(${out} "${missing}" PARENT_SCOPE)
endfunction()

# lockstep_settle_torch(LIBTORCH_CPU): libtorch's targets, if the directory has any, are of the same libtorch and can
# be started.
function(lockstep_settle_torch lockstep_cpu)
  if(NOT TARGET torch OR NOT TARGET torch_cpu)
    return()
  endif()
  get_target_property(torch_cpu torch_cpu LOCATION)
  file(REAL_PATH "${torch_cpu}" users)
  file(REAL_PATH "${lockstep_cpu}" ours)
  if(NOT users STREQUAL ours)
    message(FATAL_ERROR "find_package(Torch) found ${users}, but Lockstep has ${ours}: give both the same with -DTorch_DIR=... "
                        "(without LOCKSTEP_TORCH_DIR and LOCKSTEP_TORCH), or remove find_package(Torch) and "
                        "\${TORCH_LIBRARIES}, since lockstep::lockstep brings libtorch")
  endif()
  set_property(GLOBAL APPEND PROPERTY lockstep_settled "${CMAKE_CURRENT_SOURCE_DIR}")
  get_target_property(linked torch INTERFACE_LINK_LIBRARIES)
  if(NOT TARGET torch_cuda OR NOT "torch_cuda_library" IN_LIST linked)
    return()
  endif()
  get_target_property(torch_cuda torch_cuda LOCATION)
  lockstep_not_installed(missing "${torch_cuda}")
  if(missing STREQUAL "")
    return()
  endif()
  list(REMOVE_ITEM linked torch_cuda_library)
  # libtorch.so holds nothing but the names of the other two.
  set_target_properties(torch PROPERTIES INTERFACE_LINK_LIBRARIES "${linked}")
  get_target_property(configs torch IMPORTED_CONFIGURATIONS)
  foreach(config ${configs})
    set_target_properties(torch PROPERTIES IMPORTED_LOCATION_${config} "${torch_cpu}" IMPORTED_SONAME_${config} "libtorch_cpu.so")
  endforeach()
  message(WARNING "\${TORCH_LIBRARIES} links libtorch_cuda.so, which needs ${missing}, and that is not installed: its CUDA part is left "
                  "out, and Lockstep loads it at run time where it can. Remove find_package(Torch) and \${TORCH_LIBRARIES} to "
                  "silence this: lockstep::lockstep brings libtorch")
endfunction()

# lockstep_warn_below(LIBTORCH_CPU DIRECTORY): libtorch's targets in a directory further down cannot be changed from here.
function(lockstep_warn_below lockstep_cpu directory)
  get_property(settled GLOBAL PROPERTY lockstep_settled)
  get_property(subdirectories DIRECTORY "${directory}" PROPERTY SUBDIRECTORIES)
  foreach(subdirectory ${subdirectories})
    lockstep_warn_below("${lockstep_cpu}" "${subdirectory}")
    get_property(imported DIRECTORY "${subdirectory}" PROPERTY IMPORTED_TARGETS)
    cmake_path(REPLACE_FILENAME lockstep_cpu libtorch_cuda.so OUTPUT_VARIABLE torch_cuda)
    if("torch_cuda" IN_LIST imported AND NOT subdirectory IN_LIST settled AND EXISTS "${torch_cuda}")
      lockstep_not_installed(missing "${torch_cuda}")
      if(missing)
        message(WARNING "\${TORCH_LIBRARIES} in ${subdirectory} links libtorch_cuda.so, which needs ${missing}, and that is not installed: "
                        "such a program does not start. Remove find_package(Torch) and \${TORCH_LIBRARIES} there, since "
                        "lockstep::lockstep brings libtorch, or find Torch in ${directory}")
      endif()
    endif()
  endforeach()
endfunction()

# Now, and again at the end of `directory`: the user may look for Torch later.
function(lockstep_beside_torch directory)
  get_target_property(cpu LockstepTorch::cpu LOCATION)
  lockstep_settle_torch("${cpu}")
  cmake_language(EVAL CODE "cmake_language(DEFER DIRECTORY [[${directory}]] CALL lockstep_settle_torch [[${cpu}]])")
  cmake_language(EVAL CODE "cmake_language(DEFER DIRECTORY [[${directory}]] CALL lockstep_warn_below [[${cpu}]] [[${directory}]])")
endfunction()
