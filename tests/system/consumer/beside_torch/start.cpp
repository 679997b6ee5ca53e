#include <lockstep/comm/world.h>

#include <cstdio>

int main() { std::puts(lockstep::comm::World::from_env().describe().c_str()); }
