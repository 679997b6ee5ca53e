#define LOCKSTEP_ISA avx512
#include "parallel/adam_kernel.inl"
