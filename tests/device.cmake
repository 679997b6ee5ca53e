# Training on devices, shown on a fake one: libtorch's PrivateUse1 with real streams, and a
# library with NCCL's symbols. A program of its own, since such a device changes all of libtorch.
add_library(fake_nccl MODULE device/fake/nccl.cpp device/fake/wire.cpp)
target_link_libraries(fake_nccl PRIVATE LockstepTorch::c10 lockstep_flags)
target_include_directories(fake_nccl PRIVATE ${CMAKE_CURRENT_SOURCE_DIR} ${PROJECT_SOURCE_DIR}/src)

# The kernels of cuda_ipc, compiled for the host, behind the driver's and NVRTC's symbols.
add_library(fake_cuda MODULE device/fake/cuda.cpp device/fake/kernels.cpp)
target_link_libraries(fake_cuda PRIVATE lockstep_flags Threads::Threads)
target_include_directories(fake_cuda PRIVATE ${CMAKE_CURRENT_SOURCE_DIR} ${PROJECT_SOURCE_DIR}/src)
set_source_files_properties(device/fake/kernels.cpp PROPERTIES COMPILE_OPTIONS "-ffp-contract=off"
  OBJECT_DEPENDS "${PROJECT_SOURCE_DIR}/src/comm/cuda_ipc/kernels.cu;${PROJECT_SOURCE_DIR}/src/comm/cuda_ipc/arithmetic.h;${PROJECT_SOURCE_DIR}/src/comm/cuda_ipc/meetings.h")

add_library(fake_device OBJECT device/fake/streams.cpp device/fake/ops.cpp)
target_link_libraries(fake_device PRIVATE lockstep_flags LockstepTorch::cpu)
target_include_directories(fake_device PRIVATE ${CMAKE_CURRENT_SOURCE_DIR})
lockstep_precompile(fake_device)

lockstep_test(device lockstep lockstep_spawn fake_device)
lockstep_precompile(test_device)
# The tests of nccl and of cuda_ipc in units of their own: the same things have the same names there.
set_target_properties(test_device PROPERTIES UNITY_BUILD_BATCH_SIZE 7)
target_compile_definitions(test_device PRIVATE FAKE_NCCL="$<TARGET_FILE:fake_nccl>"
  FAKE_CUDA="$<TARGET_FILE:fake_cuda>")
add_dependencies(test_device fake_nccl fake_cuda)

# Beside the fake: the header of the real NCCL, where it is installed.
find_path(LOCKSTEP_NCCL_INCLUDE nccl.h HINTS /usr/local/cuda/include)
find_path(LOCKSTEP_CUDA_INCLUDE cuda_runtime.h HINTS /usr/local/cuda/include)
mark_as_advanced(LOCKSTEP_NCCL_INCLUDE LOCKSTEP_CUDA_INCLUDE)
if(LOCKSTEP_NCCL_INCLUDE AND LOCKSTEP_CUDA_INCLUDE)
  set_source_files_properties(device/nccl/header_test.cpp PROPERTIES SKIP_PRECOMPILE_HEADERS ON SKIP_UNITY_BUILD_INCLUSION ON
    COMPILE_OPTIONS "-isystem;${LOCKSTEP_NCCL_INCLUDE};-isystem;${LOCKSTEP_CUDA_INCLUDE}")
else()
  set_source_files_properties(device/nccl/header_test.cpp PROPERTIES HEADER_FILE_ONLY ON)
endif()

# The headers of the driver and of NVRTC, and NVRTC itself, which needs no GPU.
find_path(LOCKSTEP_CUDA_DRIVER_INCLUDE cuda.h HINTS /usr/local/cuda/include)
find_library(LOCKSTEP_NVRTC_LIBRARY NAMES nvrtc HINTS /usr/local/cuda/lib64 /usr/local/cuda/lib)
mark_as_advanced(LOCKSTEP_CUDA_DRIVER_INCLUDE LOCKSTEP_NVRTC_LIBRARY)
if(LOCKSTEP_CUDA_DRIVER_INCLUDE AND LOCKSTEP_NVRTC_LIBRARY)
  set_source_files_properties(device/cuda_ipc/header_test.cpp PROPERTIES SKIP_PRECOMPILE_HEADERS ON SKIP_UNITY_BUILD_INCLUSION ON
    COMPILE_OPTIONS "-isystem;${LOCKSTEP_CUDA_DRIVER_INCLUDE}" COMPILE_DEFINITIONS REAL_NVRTC="${LOCKSTEP_NVRTC_LIBRARY}")
else()
  message(STATUS "no CUDA toolkit: the tests that compile the kernels of cuda_ipc for GPUs are left out")
  set_source_files_properties(device/cuda_ipc/header_test.cpp PROPERTIES HEADER_FILE_ONLY ON)
endif()

# On real GPUs: always built, and a test where there are any. On the CPU the checks themselves are tested.
file(GLOB on_gpu_sources CONFIGURE_DEPENDS device/on_gpu/*.cpp)
add_executable(on_gpu ${on_gpu_sources})
target_link_libraries(on_gpu PRIVATE lockstep lockstep_flags)
target_include_directories(on_gpu PRIVATE ${CMAKE_CURRENT_SOURCE_DIR} ${CMAKE_CURRENT_SOURCE_DIR}/device ${PROJECT_SOURCE_DIR}/src)
lockstep_precompile(on_gpu)
if(LockstepTorch_CUDA AND LOCKSTEP_CUDA_INCLUDE)
  add_library(on_gpu_graph MODULE device/on_gpu/graph/cuda_graph.cpp)
  target_link_libraries(on_gpu_graph PRIVATE LockstepTorch::cpu ${LockstepTorch_LIBRARY_DIR}/libtorch_cuda.so
    ${LockstepTorch_LIBRARY_DIR}/libc10_cuda.so lockstep_flags)
  target_compile_options(on_gpu_graph PRIVATE -isystem ${LOCKSTEP_CUDA_INCLUDE})
  add_dependencies(on_gpu on_gpu_graph)
endif()
if(EXISTS /dev/nvidia0)
  add_test(NAME on_gpu COMMAND lockstep_tool run --nproc-per-node gpu $<TARGET_FILE:on_gpu>)
endif()
