# A training that is killed and resumed (resume_test.py).
add_executable(resume_trainer resume/trainer.cpp)
target_link_libraries(resume_trainer PRIVATE lockstep lockstep_flags fmt::fmt-header-only)
lockstep_precompile(resume_trainer)
