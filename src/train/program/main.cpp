// The program `lockstep-trainer`: what `lockstep train FILE` starts as ranks.
#include "lockstep/train/run.h"

int main(int argc, char** argv) { return lockstep::train::run_program(argc, argv); }
