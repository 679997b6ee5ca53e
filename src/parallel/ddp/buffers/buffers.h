// Keeps the ranks' buffers the same.
#pragma once

#include <memory>
#include <optional>
#include <string_view>
#include <vector>

#include "lockstep/comm/group.h"
#include "lockstep/parallel/ddp.h"
#include "parallel/ddp/model.h"
#include "parallel/ddp/packed.h"
#include "parallel/lanes/plan.h"
#include "parallel/layout/flat_layout.h"

namespace lockstep::parallel {

std::vector<int> all_ranks(const Group& group);
// Whether a buffer on the CPU has these elements. -0 differs from 0, and a NaN from another one,
// but not from itself.
bool same_bytes(const at::Tensor& tensor, const at::Tensor& elements);

// Broadcast, or (Buffers::Average) floating-point and complex ones averaged and the rest broadcast.
class BufferSync {
 public:
  // The ranks' buffers are the same.
  BufferSync(const Group& group, std::vector<Named> buffers, Buffers mode);

  size_t size() const { return buffers_.size(); }
  // The same ones, of which some have become other tensors like those that they were.
  void follow(const std::vector<Named>& now);

  // By buffer: whether this rank's differs from what they were at first and the last finish() left.
  // Looked at byte by byte, because batch_norm() writes to buffers without counting a version; on a
  // device that would make this thread wait, so there it is always true.
  const std::vector<char>& find_changed();

  // start() on all ranks, then finish(). `present` are the ranks whose buffers count; the first of
  // them is the source of what is broadcast.
  void start(const std::vector<int>& present);
  // Writes those buffers only that some rank changed, which is those with a share of the ranks
  // above 0, and counts a version of them on every rank: a graph that saved one of them must not
  // run backward on some ranks only.
  void finish(const std::vector<double>& shares);

  // Warns once when only some ranks have changed buffers between two steps. (Most forwards that
  // change them do so on all ranks.)
  void warn_of_own_changes(const std::vector<double>& shares);

  // All of that by itself. Every rank calls it.
  void sync();

  // With a plan: every lane begins with the buffers that the step began with, and those that it
  // leaves count as a rank's do. The first lane's are the source of what is broadcast; averages are
  // taken over lanes. find_changed() then tells of all lanes.
  void use_lanes(std::shared_ptr<const LanePlan> plan);
  void begin_lanes();  // the first one
  void begin_lane();   // a further one
  void end_lane(int64_t own_lane);
  // In the place of start() and finish(), after the last.
  void finish_lanes(const std::vector<double>& shares);
  // Of a step that cannot be finished: buffers become again what it began with.
  void abandon_lanes();
  // Whether the step began with others than the one before has left. Then check_start() on all
  // ranks, which throws ConfigError there unless they are the same: another loop's lanes may have
  // changed them, on each rank by its own.
  bool is_start_changed() const { return lanes_ && lanes_->start_changed; }
  void check_start(std::string_view address);

 private:
  // Buffers of one dtype in one memory.
  struct Flat {
    FlatLayout layout;
    std::vector<size_t> members = {};  // buffers
    at::Tensor flat = {};              // complex ones as pairs of real numbers
    comm::Work work = {};
  };

  // The averaged buffers of one dtype as parts of `flat`, in the order of members.
  std::vector<at::Tensor> places_in(const Flat& averaged, const at::Tensor& flat) const;
  void write(size_t buffer) const { write(buffer, places_[buffer]); }
  void write(size_t buffer, const at::Tensor& value) const;
  void compare();
  bool is_changed_in_lane(size_t buffer) const;
  // This rank's buffers become those that the first of all lanes left.
  void restore_first_lane();

  struct Lanes {
    std::shared_ptr<const LanePlan> plan;
    std::vector<at::Tensor> start, first;  // by buffer
    std::vector<char> changed;
    bool start_changed = false;
    bool under_way = false;                      // a step is
    std::vector<std::vector<at::Tensor>> slots;  // by averaged flat
  };

  Group group_;
  std::vector<Named> buffers_;
  std::vector<at::Tensor> places_;  // by buffer: what finish() left, in a flat
  Packed copied_;
  std::vector<Flat> averaged_;
  std::vector<size_t> averaged_buffers_;
  int64_t divisor_ = 1;
  std::vector<char> changed_;
  Buffers mode_;
  bool warned_ = false;
  std::optional<Lanes> lanes_;
};

}  // namespace lockstep::parallel
