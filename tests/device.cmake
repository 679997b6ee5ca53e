# Training on devices, shown on a fake one: libtorch's device for strangers with real streams, and a
# library with NCCL's symbols. A program of its own, since such a device changes all of libtorch.
add_library(fake_nccl MODULE device/fake_nccl.cpp device/fake_wire.cpp)
target_link_libraries(fake_nccl PRIVATE LockstepTorch::c10 lockstep_flags)
target_include_directories(fake_nccl PRIVATE ${CMAKE_CURRENT_SOURCE_DIR} ${PROJECT_SOURCE_DIR}/src)

add_library(fake_device OBJECT device/fake_streams.cpp device/fake_ops.cpp)
target_link_libraries(fake_device PRIVATE lockstep_flags LockstepTorch::cpu)
target_include_directories(fake_device PRIVATE ${CMAKE_CURRENT_SOURCE_DIR})
lockstep_precompile(fake_device)

lockstep_test(device lockstep lockstep_spawn fake_device)
lockstep_precompile(test_device)
target_compile_definitions(test_device PRIVATE FAKE_NCCL="$<TARGET_FILE:fake_nccl>")
add_dependencies(test_device fake_nccl)

# Beside the fake: the header of the real NCCL, where it is installed.
find_path(LOCKSTEP_NCCL_INCLUDE nccl.h HINTS /usr/local/cuda/include)
find_path(LOCKSTEP_CUDA_INCLUDE cuda_runtime.h HINTS /usr/local/cuda/include)
mark_as_advanced(LOCKSTEP_NCCL_INCLUDE LOCKSTEP_CUDA_INCLUDE)
if(LOCKSTEP_NCCL_INCLUDE AND LOCKSTEP_CUDA_INCLUDE)
  set_source_files_properties(device/nccl_header_test.cpp PROPERTIES SKIP_PRECOMPILE_HEADERS ON SKIP_UNITY_BUILD_INCLUSION ON
    COMPILE_OPTIONS "-isystem;${LOCKSTEP_NCCL_INCLUDE};-isystem;${LOCKSTEP_CUDA_INCLUDE}")
else()
  set_source_files_properties(device/nccl_header_test.cpp PROPERTIES HEADER_FILE_ONLY ON)
endif()

# On real GPUs: always built, and a test where there are any. On the CPU the checks themselves are tested.
file(GLOB on_gpu_sources CONFIGURE_DEPENDS device/on_gpu/*.cpp)
add_executable(on_gpu ${on_gpu_sources})
target_link_libraries(on_gpu PRIVATE lockstep lockstep_flags)
target_include_directories(on_gpu PRIVATE ${CMAKE_CURRENT_SOURCE_DIR} ${CMAKE_CURRENT_SOURCE_DIR}/device ${PROJECT_SOURCE_DIR}/src)
lockstep_precompile(on_gpu)
if(EXISTS /dev/nvidia0)
  add_test(NAME on_gpu COMMAND lockstep_tool run --nproc-per-node gpu $<TARGET_FILE:on_gpu>)
endif()
