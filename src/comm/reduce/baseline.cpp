#define LOCKSTEP_ISA baseline
#include "comm/reduce/kernels.inl"
