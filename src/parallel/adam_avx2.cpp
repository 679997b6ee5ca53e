#define LOCKSTEP_ISA avx2
#include "parallel/adam_kernel.inl"
