#define LOCKSTEP_ISA avx2
#include "parallel/optim/adam_kernel.inl"
