#include "launch/output/line_prefixer.h"

#include <utility>

namespace lockstep::launch {

void LinePrefixer::end_line(std::string_view rest, std::string_view end, std::string& out) {
  out += tag_;
  out += line_;
  out += rest;
  out += end;
  line_.clear();
}

void LinePrefixer::feed(std::string_view bytes, std::string& out) {
  while (!bytes.empty()) {
    if (std::exchange(after_cr_, false) && bytes.front() == '\n') {
      // The second half of a \r\n that was split between two reads, or that ends a progress bar.
      if (target_ == Target::Terminal) out += '\n';
      bytes.remove_prefix(1);
      continue;
    }
    const size_t at = bytes.find_first_of("\n\r");
    if (at == std::string_view::npos) {
      line_ += bytes;
      if (line_.size() >= kLongest) end_line("", "\n", out);
      return;
    }
    const std::string_view rest = bytes.substr(0, at);
    const bool is_progress = bytes[at] == '\r' && !bytes.substr(at + 1).starts_with('\n');
    if (!is_progress) {
      end_line(rest, "\n", out);
      bytes.remove_prefix(bytes[at] == '\r' ? at + 2 : at + 1);
      continue;
    }
    // "\rstep 5" begins with its \r: nothing stands before it, and nothing is shown.
    if (!line_.empty() || !rest.empty()) {
      end_line(rest, target_ == Target::Terminal ? "\r" : "\n", out);
      after_cr_ = true;
    }
    bytes.remove_prefix(at + 1);
  }
}

void LinePrefixer::finish(std::string& out) {
  if (!line_.empty()) end_line("", "\n", out);
}

}  // namespace lockstep::launch
