# Random training programs, against one process that does the same.
file(GLOB sources CONFIGURE_DEPENDS random/training/*.cpp)
add_executable(random_training ${sources})
target_link_libraries(random_training PRIVATE lockstep lockstep_spawn lockstep_flags fmt::fmt-header-only GTest::gtest)
target_include_directories(random_training PRIVATE ${CMAKE_CURRENT_SOURCE_DIR} ${PROJECT_SOURCE_DIR}/src)
set_target_properties(random_training PROPERTIES UNITY_BUILD_MODE BATCH UNITY_BUILD_BATCH_SIZE 13)
lockstep_precompile(random_training)
add_test(NAME random_training COMMAND random_training --seed 1 --count 200)
set_tests_properties(random_training PROPERTIES COST 900 TIMEOUT 600)
