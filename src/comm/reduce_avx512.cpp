#define LOCKSTEP_ISA avx512
#include "comm/reduce_kernels.inl"
