// One save, from what is to be written to a published checkpoint.
#pragma once

#include <chrono>
#include <string>

#include "checkpoint/share.h"
#include "lockstep/checkpoint/directory.h"
#include "lockstep/comm/group.h"

namespace lockstep::checkpoint {

struct Save {
  comm::Group group;
  std::chrono::milliseconds timeout;
  FileSystem* files;
  Directory* directory;  // on rank 0
  Retention retention;
  std::string folder;  // that rank 0 has begun
  Manifest manifest;   // without boxes and files
  Share share;

  // Every rank calls it: writes the share, and publishes when all have. Throws CheckpointError on
  // all ranks when that failed on any.
  void run() const;

 private:
  std::string write_share() const;
  std::string advice() const;
  void publish(const std::vector<std::string>& reports) const;
};

}  // namespace lockstep::checkpoint
