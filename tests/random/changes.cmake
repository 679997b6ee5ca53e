# Random trainings that change while they run, against one process that does the same.
file(GLOB sources CONFIGURE_DEPENDS random/changes/*.cpp)
add_executable(random_changes ${sources})
target_link_libraries(random_changes PRIVATE lockstep lockstep_spawn lockstep_flags fmt::fmt-header-only GTest::gtest)
target_include_directories(random_changes PRIVATE ${CMAKE_CURRENT_SOURCE_DIR} ${PROJECT_SOURCE_DIR}/src)
lockstep_precompile(random_changes)
add_test(NAME random_changes COMMAND random_changes --seed 1 --count 75)
set_tests_properties(random_changes PROPERTIES COST 900 TIMEOUT 600)
