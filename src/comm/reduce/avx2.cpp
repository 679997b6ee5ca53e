#define LOCKSTEP_ISA avx2
#include "comm/reduce/kernels.inl"
