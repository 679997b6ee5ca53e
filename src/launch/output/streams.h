// The choice of the ranks' output streams that a flag makes.
#pragma once

#include <map>
#include <string_view>

namespace lockstep::launch {

// For each rank of this host: its stdout, its stderr, both or neither.
class StreamChoice {
 public:
  enum Stream { Out = 1, Err = 2 };

  // torchrun's words for --redirects and --tee: 0 neither, 1 stdout, 2 stderr, 3 both, on all local
  // ranks; or for some of them, such as "0:3,12:1". Throws ConfigError that names `flag`.
  static StreamChoice parse(std::string_view flag, std::string_view text);

  bool covers(int local_rank, Stream stream) const;
  bool is_empty() const { return everywhere_ == 0 && some_.empty(); }
  // The highest local rank that it names; -1 when it names none.
  int last_rank() const { return some_.empty() ? -1 : some_.rbegin()->first; }

 private:
  int everywhere_ = 0;
  std::map<int, int> some_;
};

}  // namespace lockstep::launch
