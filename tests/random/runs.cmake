# Random runs of a Trainer, which are interrupted and started again.
file(GLOB sources CONFIGURE_DEPENDS random/runs/*.cpp)
add_executable(random_runs ${sources})
target_link_libraries(random_runs PRIVATE lockstep lockstep_spawn lockstep_flags fmt::fmt-header-only GTest::gtest ${CMAKE_DL_LIBS})
target_include_directories(random_runs PRIVATE ${CMAKE_CURRENT_SOURCE_DIR} ${PROJECT_SOURCE_DIR}/src)
lockstep_precompile(random_runs)
add_test(NAME random_runs COMMAND random_runs --seed 1 --count 9)
set_tests_properties(random_runs PROPERTIES COST 900 TIMEOUT 600)
