# `cpack` in the build folder makes a .deb and a .tar.gz of what `cmake --install` installs, without the build machine's
# libtorch in it: a program brings its own (docs/packages.md).
set(CPACK_GENERATOR DEB TGZ)
set(CPACK_PACKAGE_NAME lockstep)
set(CPACK_PACKAGE_VENDOR "The Lockstep authors")
set(CPACK_PACKAGE_CONTACT "The Lockstep authors <lockstep@localhost>")
set(CPACK_PACKAGE_DESCRIPTION_SUMMARY "${PROJECT_DESCRIPTION}")
if(LOCKSTEP_TORCH)
  string(APPEND CPACK_PACKAGE_DESCRIPTION_SUMMARY ", for libtorch ${LockstepTorch_MINOR}")
endif()
set(CPACK_PACKAGE_DIRECTORY ${PROJECT_BINARY_DIR}/packages)
set(CPACK_RESOURCE_FILE_LICENSE ${PROJECT_SOURCE_DIR}/LICENSE)
set(CPACK_STRIP_FILES ON)
set(CPACK_THREADS 0)
set(CPACK_PRE_BUILD_SCRIPTS ${PROJECT_SOURCE_DIR}/cmake/LockstepPackagePaths.cmake)

# Debian's name and architecture; what the libraries need is read off them. libtorch is in no package.
set(CPACK_DEBIAN_FILE_NAME DEB-DEFAULT)
set(CPACK_DEBIAN_PACKAGE_SECTION science)
set(CPACK_DEBIAN_PACKAGE_SHLIBDEPS ON)
set(CPACK_DEBIAN_PACKAGE_SHLIBDEPS_PRIVATE_DIRS ${CMAKE_LIBRARY_OUTPUT_DIRECTORY} ${LockstepTorch_LIBRARY_DIR})
set(CPACK_DEBIAN_PACKAGE_RECOMMENDS "g++ (>= 4:12), cmake (>= 3.25)")
set(CPACK_DEBIAN_COMPRESSION_TYPE zstd)
include(CPack)
