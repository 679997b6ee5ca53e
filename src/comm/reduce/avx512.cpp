#define LOCKSTEP_ISA avx512
#include "comm/reduce/kernels.inl"
