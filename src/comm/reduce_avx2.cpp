#define LOCKSTEP_ISA avx2
#include "comm/reduce_kernels.inl"
