# A project that has find_package(Torch) and ${TORCH_LIBRARIES} beside Lockstep, before it or after.
#
# TorchConfig links libtorch_cuda.so into every program. Where one of CUDA's libraries is not installed such a program
# ends before main(), though it would train on the CPU. Lockstep's programs do not link it: it is loaded where there
# are GPUs.

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
    message(FATAL_ERROR "find_package(Torch) found ${users}, but Lockstep has ${ours}: give both the same with -DTorch_DIR=..., or "
                        "remove find_package(Torch) and \${TORCH_LIBRARIES}, since lockstep::lockstep brings libtorch")
  endif()
  get_target_property(linked torch INTERFACE_LINK_LIBRARIES)
  if(NOT TARGET torch_cuda OR NOT "torch_cuda_library" IN_LIST linked)
    return()
  endif()
  get_target_property(torch_cuda torch_cuda LOCATION)
  execute_process(COMMAND ldd ${torch_cuda} OUTPUT_VARIABLE needs ERROR_QUIET)
  string(REGEX MATCH "[^ \t\n]+ => not found" missing "${needs}")
  if(missing STREQUAL "")
    return()
  endif()
  string(REPLACE " => not found" "" missing "${missing}")
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

# Now, and again at the end of `directory`: the user may look for Torch later.
function(lockstep_beside_torch directory)
  get_target_property(cpu LockstepTorch::cpu LOCATION)
  lockstep_settle_torch("${cpu}")
  cmake_language(EVAL CODE "cmake_language(DEFER DIRECTORY [[${directory}]] CALL lockstep_settle_torch [[${cpu}]])")
endfunction()
