// The processor of this host, as Linux describes it in /proc/cpuinfo.
#pragma once

#include <string>

namespace lockstep {

// "AMD EPYC 9B14"; empty where Linux gives no name.
std::string processor_name();

// What multiplies bfloat16 ("AMX"); empty when nothing does.
std::string native_bf16_cpu();

}  // namespace lockstep
