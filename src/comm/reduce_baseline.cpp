#define LOCKSTEP_ISA baseline
#include "comm/reduce_kernels.inl"
