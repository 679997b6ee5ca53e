# Random programs for Group (tests/random/group), as one CTest entry.
file(GLOB group_sources CONFIGURE_DEPENDS ${CMAKE_CURRENT_LIST_DIR}/group/*.cpp)
add_executable(random_group ${group_sources})
target_link_libraries(random_group PRIVATE lockstep lockstep_spawn lockstep_flags fmt::fmt-header-only)
target_include_directories(random_group PRIVATE ${CMAKE_CURRENT_SOURCE_DIR} ${PROJECT_SOURCE_DIR}/src)
lockstep_precompile(random_group)
add_test(NAME random_group COMMAND random_group --seed 1 --count 350)
set_tests_properties(random_group PROPERTIES COST 900)
