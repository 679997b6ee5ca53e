# How every target of the project is compiled, and where its dependencies are found.
include(GNUInstallDirs)
set(CMAKE_CXX_STANDARD 20)
set(CMAKE_CXX_STANDARD_REQUIRED ON)
set(CMAKE_CXX_EXTENSIONS OFF)
set(CMAKE_POSITION_INDEPENDENT_CODE ON)  # one precompiled header for library and programs
set(CMAKE_EXPORT_COMPILE_COMMANDS ON)
set(CMAKE_LIBRARY_OUTPUT_DIRECTORY ${PROJECT_BINARY_DIR}/lib)
set(CMAKE_RUNTIME_OUTPUT_DIRECTORY ${PROJECT_BINARY_DIR}/bin)
set(CMAKE_UNITY_BUILD ${LOCKSTEP_UNITY})
# Sources that are compiled as one: most of the time goes into templates of torch's headers, so 16 take as long as 8.
set(CMAKE_UNITY_BUILD_BATCH_SIZE 16)
if(NOT CMAKE_BUILD_TYPE)
  set(CMAKE_BUILD_TYPE Release)
endif()
set(CMAKE_CXX_FLAGS_RELEASE "-O2 -g0")
# What a project around this one says to its compiler is said to Lockstep's sources, too.
get_directory_property(outer COMPILE_OPTIONS)
string(REPLACE ";" " " outer " ${CMAKE_CXX_FLAGS} ${outer} ")
if(outer MATCHES " (-fno-exceptions|-fno-rtti) ")
  message(FATAL_ERROR "Lockstep cannot be compiled with ${CMAKE_MATCH_1}, nor can libtorch's headers: set it for your "
                      "own targets alone, with target_compile_options")
endif()
if(NOT LOCKSTEP_WERROR)
  add_compile_options(-Wno-error)  # of such a project, which asks for more warnings than these sources are free of
endif()
# Losses that are not finite have to be seen, and the same bits to come out whether or not the processor can fuse a
# product with a sum.
add_compile_options(-fno-fast-math -ffp-contract=off)
# Else the library, once loaded, would have the processor take small numbers for 0.
add_link_options(-fno-fast-math -fno-unsafe-math-optimizations)
# Its symbols are what a program links.
set(CMAKE_CXX_VISIBILITY_PRESET default)
set(CMAKE_VISIBILITY_INLINES_HIDDEN OFF)

find_program(LOCKSTEP_CCACHE ccache)
if(LOCKSTEP_CCACHE AND NOT CMAKE_CXX_COMPILER_LAUNCHER)
  # The paths are made relative and the header's time is left out, so that a second clone finds the first one's results.
  set(CMAKE_CXX_COMPILER_LAUNCHER ${CMAKE_COMMAND} -E env CCACHE_BASEDIR=${PROJECT_SOURCE_DIR}
      CCACHE_NOHASHDIR=1 CCACHE_SLOPPINESS=pch_defines,time_macros,include_file_mtime,include_file_ctime
      ${LOCKSTEP_CCACHE})
endif()
if(LOCKSTEP_SANITIZE)
  add_compile_options(-fsanitize=${LOCKSTEP_SANITIZE} -fno-omit-frame-pointer -fno-sanitize-recover=all)
  add_link_options(-fsanitize=${LOCKSTEP_SANITIZE})
endif()

# What scripts/setup.sh --no-root has unpacked.
if(EXISTS ${PROJECT_SOURCE_DIR}/.deps/debian/usr)
  list(APPEND CMAKE_PREFIX_PATH ${PROJECT_SOURCE_DIR}/.deps/debian/usr)
endif()
find_package(Threads REQUIRED)
find_package(fmt REQUIRED)
find_package(nlohmann_json REQUIRED)
find_package(OpenSSL REQUIRED)
find_package(CLI11 REQUIRED)
find_package(yaml-cpp REQUIRED)
find_package(ZLIB REQUIRED)
if(LOCKSTEP_TORCH)
  find_package(JPEG REQUIRED)
  find_package(PNG REQUIRED)
  find_package(LockstepTorch 2.11 REQUIRED)
  if(NOT PROJECT_IS_TOP_LEVEL)
    include(LockstepBesideTorch)
    lockstep_beside_torch("${CMAKE_SOURCE_DIR}")
  endif()
  if(LOCKSTEP_CUDA STREQUAL "ON" AND NOT LockstepTorch_CUDA)
    message(FATAL_ERROR "LOCKSTEP_CUDA=ON, but there is no libtorch_cuda.so in ${LockstepTorch_LIBRARY_DIR}: install a libtorch "
                        "with CUDA, or use AUTO, which decides at run time")
  endif()
endif()

# Settings of every target we compile.
add_library(lockstep_flags INTERFACE)
target_compile_options(lockstep_flags INTERFACE -Wall -Wextra -Wpedantic -Wshadow -Wnon-virtual-dtor
                       -Wno-missing-field-initializers $<$<BOOL:${LOCKSTEP_WERROR}>:-Werror>)
if(LOCKSTEP_UNITY AND CMAKE_CXX_COMPILER_ID STREQUAL "GNU")
  # Meant for headers, which to this warning all sources of a unity build are.
  target_compile_options(lockstep_flags INTERFACE -Wno-subobject-linkage)
endif()

# lockstep_precompile(TARGET): shares one precompiled torch/torch.h among all targets of the directory that include it, and
# of those below, unless these name another in lockstep_pch: a header's options are its users'.
set(lockstep_pch lockstep_pch)
function(lockstep_precompile target)
  if(NOT TARGET ${lockstep_pch})
    file(CONFIGURE OUTPUT ${PROJECT_BINARY_DIR}/pch.cpp CONTENT "")  # written once: a newer one would rebuild everything
    add_library(${lockstep_pch} OBJECT ${PROJECT_BINARY_DIR}/pch.cpp)
    set_target_properties(${lockstep_pch} PROPERTIES UNITY_BUILD OFF)
    target_link_libraries(${lockstep_pch} PUBLIC lockstep_flags LockstepTorch::cpu)
    target_compile_options(${lockstep_pch} PRIVATE -fPIC)
    target_precompile_headers(${lockstep_pch} PRIVATE <torch/torch.h>)
  endif()
  # A program's -fPIE differs from the header's -fPIC.
  set_target_properties(${target} PROPERTIES POSITION_INDEPENDENT_CODE OFF)
  target_compile_options(${target} PRIVATE -fPIC)
  target_precompile_headers(${target} REUSE_FROM ${lockstep_pch})
endfunction()
