# `cmake --install` gives a package that an outside project finds with find_package(lockstep).
include(CMakePackageConfigHelpers)
set(package_dir ${CMAKE_INSTALL_LIBDIR}/cmake/lockstep)
set(targets lockstep_core lockstep_tool)
if(LOCKSTEP_TORCH)
  list(APPEND targets lockstep lockstep_trainer)
  # The libtorch that this was built against, unless a program brings another.
  set_target_properties(lockstep PROPERTIES INSTALL_RPATH "\$ORIGIN;${LockstepTorch_LIBRARY_DIR}")
  set_target_properties(lockstep_trainer PROPERTIES INSTALL_RPATH
                        "\$ORIGIN/../${CMAKE_INSTALL_LIBDIR};${LockstepTorch_LIBRARY_DIR}")
endif()
set_target_properties(lockstep_tool PROPERTIES INSTALL_RPATH "\$ORIGIN/../${CMAKE_INSTALL_LIBDIR}")
foreach(target lockstep_core lockstep)
  if(TARGET ${target})
    string(REPLACE "lockstep_" "" exported ${target})
    set_target_properties(${target} PROPERTIES EXPORT_NAME ${exported})
  endif()
endforeach()
install(TARGETS ${targets} EXPORT lockstep-targets)
install(DIRECTORY include/lockstep DESTINATION ${CMAKE_INSTALL_INCLUDEDIR})
install(EXPORT lockstep-targets NAMESPACE lockstep:: DESTINATION ${package_dir})
configure_package_config_file(cmake/lockstepConfig.cmake.in ${PROJECT_BINARY_DIR}/lockstepConfig.cmake
                              INSTALL_DESTINATION ${package_dir})
write_basic_package_version_file(${PROJECT_BINARY_DIR}/lockstepConfigVersion.cmake COMPATIBILITY SameMinorVersion)
install(FILES ${PROJECT_BINARY_DIR}/lockstepConfig.cmake ${PROJECT_BINARY_DIR}/lockstepConfigVersion.cmake
              cmake/FindLockstepTorch.cmake cmake/LockstepBesideTorch.cmake DESTINATION ${package_dir})
