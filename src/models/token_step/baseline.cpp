#define LOCKSTEP_ISA baseline
#include "models/token_step/kernels.inl"
