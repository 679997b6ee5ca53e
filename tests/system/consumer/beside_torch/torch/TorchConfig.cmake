# The targets of libtorch's own TorchConfig with CUDA, which itself stops where there is no CUDA toolkit. TORCH_ROOT:
# the libtorch.
foreach(library c10 torch_cpu torch_cuda torch)
  add_library(${library} SHARED IMPORTED)
  set_target_properties(${library} PROPERTIES IMPORTED_CONFIGURATIONS RELEASE IMPORTED_SONAME_RELEASE lib${library}.so
    IMPORTED_LOCATION_RELEASE ${TORCH_ROOT}/lib/lib${library}.so)
  add_library(${library}_library INTERFACE IMPORTED)
  set_target_properties(${library}_library PROPERTIES INTERFACE_LINK_LIBRARIES
    "-Wl,--no-as-needed,\"$<TARGET_FILE:${library}>\" -Wl,--as-needed;$<TARGET_PROPERTY:${library},INTERFACE_LINK_LIBRARIES>")
endforeach()
set_target_properties(torch_cpu PROPERTIES INTERFACE_LINK_LIBRARIES c10)
set_target_properties(torch_cuda PROPERTIES INTERFACE_LINK_LIBRARIES torch_cpu_library)
set_target_properties(torch PROPERTIES INTERFACE_LINK_LIBRARIES "torch_cpu_library;torch_cuda_library"
  INTERFACE_INCLUDE_DIRECTORIES "${TORCH_ROOT}/include;${TORCH_ROOT}/include/torch/csrc/api/include")
set(TORCH_LIBRARIES torch torch_library ${TORCH_ROOT}/lib/libc10.so)
