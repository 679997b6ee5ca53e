#define LOCKSTEP_ISA avx512
#include "parallel/optim/adam_kernel.inl"
