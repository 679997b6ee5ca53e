// Flags appended to the last bucket: which parameters some rank reached, which ranks had gradients,
// which buffers some rank changed, whether some rank refuses the pass, accumulates, or divides
// samples in an order that was not compared yet, and what Join needs.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

#include "lockstep/parallel/ddp.h"

namespace lockstep::parallel {

// One element per parameter, set where it was reached; with Unused::Error as many more, set where
// it was not but should have been; then two per rank, one per buffer, and four. What matters after
// the reduction is only whether the sum or average is above 0, which no rounding of a narrow dtype
// can change.
class UsageFlags {
 public:
  enum class Presence : uint8_t {
    Absent,    // the rank has no gradients of its own
    Held,      // it has some from micro-batches under hold(), but is in no backward()
    Backward,  // it is in a backward()
  };

  UsageFlags() = default;
  struct Counts {
    size_t parameters = 0, lacking = 0, ranks = 0, buffers = 0;
    size_t all() const { return parameters + lacking + 2 * ranks + buffers + 4; }
  };
  // `elements` are of any real dtype, as many as counted; collectives combine them in place.
  UsageFlags(at::Tensor elements, const Counts& counts)
      : elements_(std::move(elements)), counts_(counts) {}

  const at::Tensor& elements() const { return elements_; }

  // Before the reduction. The usual case, in which all parameters were reached:
  void write_all_reached();
  void write(const std::vector<char>& reached, const std::vector<char>& lacking = {});
  // This rank has no gradients: it reaches no parameter and lacks none.
  void write_absent();
  // Only when present() and in_backward() will be called.
  void write_presence(int rank, Presence presence);
  // Some gradient of this rank was added to one of a pass before; with lanes: some buffer was not
  // what the step before had left.
  void write_prior();
  void clear_prior();
  void write_changed(const std::vector<char>& changed);
  void write_objection();
  // A Loader or sampler of this rank divides samples in an order that was not compared yet.
  void write_new_order();
  // This pass has gradients of this rank's from hold().
  void write_held();

  // After it.
  bool any_lacking() const;
  std::vector<char> set() const;  // by parameter
  std::vector<char> lacking() const;
  std::vector<int> present() const;  // ranks
  std::vector<int> in_backward() const;
  bool has_prior() const;
  std::vector<double> changed() const;  // by buffer: the sum or average over ranks
  // Whether some rank wrote an objection. Always false on a device, where to ask would mean to wait
  // for it. The flag stays until clear_objection().
  bool objected() const { return is_set(counts_.all() - 1); }
  void clear_objection();
  // Whether some rank wrote a new order. On a device this waits for it. Stays until
  // clear_new_order().
  bool has_new_order() const;
  void clear_new_order();
  // Whether some rank wrote that. On a device this waits for it. Stays until clear_held().
  bool has_held() const;
  void clear_held();

 private:
  at::Tensor of_parameters() const { return part(0, counts_.parameters); }
  at::Tensor of_lacking() const { return part(counts_.parameters, counts_.lacking); }
  at::Tensor of_ranks(size_t block) const {
    return part(counts_.parameters + counts_.lacking + block * counts_.ranks, counts_.ranks);
  }
  at::Tensor of_buffers() const {
    return part(counts_.parameters + counts_.lacking + 2 * counts_.ranks, counts_.buffers);
  }
  at::Tensor of_held() const { return part(counts_.all() - 4, 1); }
  at::Tensor of_new_order() const { return part(counts_.all() - 3, 1); }
  at::Tensor of_prior() const { return part(counts_.all() - 2, 1); }
  at::Tensor of_objection() const { return part(counts_.all() - 1, 1); }
  std::vector<int> ranks_in(size_t block) const;
  at::Tensor part(size_t begin, size_t count) const;
  bool is_set(size_t place) const;  // false on a device

  at::Tensor elements_;
  Counts counts_;
};

}  // namespace lockstep::parallel
