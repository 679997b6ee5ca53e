// Cuts one stream of a rank into lines and puts the rank's tag before each.
#pragma once

#include <string>
#include <string_view>

namespace lockstep::launch {

// Bytes other than \n and \r pass unchanged. A line leaves when it is complete, so that lines of
// several ranks never mix; one of more than kLongest bytes is cut into several.
//   \r\n ends a line as \n does.
//   \r alone ends a progress line: in a terminal it stays a \r, so that the next line overwrites
//   it; elsewhere it becomes \n.
class LinePrefixer {
 public:
  static constexpr size_t kLongest = 1 << 20;
  enum class Target { Terminal, File };

  LinePrefixer(std::string tag, Target target) : tag_(std::move(tag)), target_(target) {}

  // Appends the lines that `bytes` completes, tagged, to `out`.
  void feed(std::string_view bytes, std::string& out);
  // The unfinished last line, if any, with an end.
  void finish(std::string& out);

 private:
  void end_line(std::string_view rest, std::string_view end, std::string& out);

  std::string tag_;
  Target target_;
  std::string line_;       // the unfinished line
  bool after_cr_ = false;  // the last byte was a \r that has already ended a line
};

}  // namespace lockstep::launch
