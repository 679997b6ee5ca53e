// What is read of a checkpoint, and where it goes.
#pragma once

#include <optional>
#include <set>
#include <string>
#include <vector>

#include "checkpoint/share.h"
#include "lockstep/checkpoint/checkpoint.h"
#include "lockstep/checkpoint/checkpointer.h"

namespace lockstep::checkpoint {

// This rank's part of restoring: prepare(), and when all ranks are well, finish().
class Restore {
 public:
  // `ranks`: of the group that restores.
  Restore(const Tracked& tracked, EachRank each_rank, const RestoreOptions& options,
          FileSystem& files, int ranks);

  enum class Fault { None, Damaged, Other };
  struct Outcome {
    Fault fault = Fault::None;
    std::string reason = {};  // without a fault: which checkpoint it is, in kIdentity letters; text
  };
  static constexpr size_t kIdentity = 16;
  // Opens the checkpoint, compares it with what is tracked, and verifies the checksum of all that
  // will be read. Changes nothing.
  Outcome prepare(const std::string& folder);

  // Reads. Objects that have no tensors come first: what they refuse is known before any tensor is
  // changed.
  void finish();

  const Manifest& manifest() const { return checkpoint_->manifest(); }

 private:
  // A box in a file that has elements of a part.
  struct Read {
    const std::string* tensor;  // its name in the manifest
    const ManifestBox* from;
    at::ScalarType dtype;
    const Part* to;
  };
  struct Wanted {
    Stateful* object;
    State state;
    bool any = false;                           // the checkpoint has something of it
    std::vector<const std::string*> from = {};  // the manifest's name of each of state.pieces
  };

  void compare();
  void compare(const std::string& prefix, Wanted& wanted);
  std::string own_name(const std::string& name) const;
  void add_own(const std::string& prefix, Saved& saved);
  void compare_values(const std::string& prefix, Wanted& wanted);
  void find_unexpected();
  const std::string* primary(const std::string& name) const;
  const std::string* stored(const std::string& name, Held held,
                            const std::vector<std::string>& aliases);
  void plan();
  void verify();
  struct Copy {
    char* to;
    const char* from;
    size_t bytes;
  };
  void fill(const Read& read, std::vector<Copy>& later);

  const Tracked& tracked_;
  const EachRank each_rank_;
  const RestoreOptions& options_;
  FileSystem& files_;
  const int ranks_;    // of the group
  const int threads_;  // to read with, at most
  std::optional<Checkpoint> checkpoint_;
  std::vector<Wanted> wanted_;
  std::set<std::string> used_;       // tensors and values of the manifest
  std::vector<std::string> others_;  // patterns of what belongs to other ranks
  std::vector<std::string> faults_;
  std::vector<Read> reads_;
};

}  // namespace lockstep::checkpoint
