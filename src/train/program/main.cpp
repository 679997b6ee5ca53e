// The program `lockstep-trainer`: what `lockstep train FILE` starts as ranks.
#include <csignal>

#include "lockstep/train/run.h"

int main(int argc, char** argv) {
  std::signal(SIGXFSZ, SIG_IGN);  // a write beyond RLIMIT_FSIZE is an error
  return lockstep::train::run_program(argc, argv);
}
