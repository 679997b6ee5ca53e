#define LOCKSTEP_ISA avx2
#include "models/token_step/kernels.inl"
