# vcpkg install lockstep --overlay-ports=packaging/vcpkg/ports
# libtorch comes by LOCKSTEP_TORCH, as everywhere; vcpkg's own is older than what Lockstep needs.
get_filename_component(SOURCE_PATH "${CMAKE_CURRENT_LIST_DIR}/../../../.." ABSOLUTE)
if(NOT DEFINED ENV{LOCKSTEP_TORCH})
  message(FATAL_ERROR "lockstep: set LOCKSTEP_TORCH to a libtorch >= 2.11, and VCPKG_KEEP_ENV_VARS=LOCKSTEP_TORCH")
endif()
vcpkg_cmake_configure(
  SOURCE_PATH "${SOURCE_PATH}"
  OPTIONS -DLOCKSTEP_WERROR=OFF -DLOCKSTEP_TESTS=OFF -DLOCKSTEP_EXAMPLES=OFF -DLOCKSTEP_BENCHMARKS=OFF -DLOCKSTEP_TORCH_DIR=$ENV{LOCKSTEP_TORCH}
)
vcpkg_cmake_install()
vcpkg_cmake_config_fixup(CONFIG_PATH lib/cmake/lockstep)
vcpkg_copy_tools(TOOL_NAMES lockstep lockstep-bench lockstep-trainer AUTO_CLEAN)
file(REMOVE_RECURSE "${CURRENT_PACKAGES_DIR}/debug/include")
vcpkg_install_copyright(FILE_LIST "${SOURCE_PATH}/LICENSE")
