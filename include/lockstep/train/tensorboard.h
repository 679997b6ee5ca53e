// Scalars as TensorBoard reads them: an event file of TFRecords with protobuf messages. Needs no
// torch.
#pragma once

#include <cstdint>
#include <fstream>
#include <string>
#include <string_view>

#include "lockstep/train/run_log.h"

namespace lockstep::train {

// The CRC-32C of TFRecord files, masked as they have it.
uint32_t masked_crc(std::string_view bytes);

// A record of an event file with one scalar, or, without a tag, the one that begins a file.
std::string scalar_record(std::string_view tag, double value, int64_t step, double unix_seconds);

// A record that says that a run resumes with `step`: what earlier files of the folder have of it
// and of later steps is made again.
std::string start_record(int64_t step, double unix_seconds);

// Writes a file events.out.tfevents.SECONDS.HOST.PID into a folder, on one rank. What goes wrong
// while it writes is warned of once, and training continues.
class TensorBoardWriter {
 public:
  // Makes the folder, too. `resumed_at`: the step that a run resumes from; -1: it begins. What
  // earlier files of the folder have of later steps is not shown any more. Throws Error when the
  // file cannot be made.
  explicit TensorBoardWriter(const std::string& folder, int64_t resumed_at = -1);

  // `tag` as "train/loss": what is before the slash is TensorBoard's group.
  void scalar(std::string_view tag, double value, int64_t step);
  // All that is in it: train/..., system/..., and one line for each of at most eight ranks.
  // train/loss is shown_loss().
  void report(const StepReport& report);
  // Writes the values as evaluation/NAME.
  void evaluation(const EvaluationReport& evaluation);
  // Gives what was written to the operating system; report() and evaluation() do it, too.
  void flush();

 private:
  void write(const std::string& record);

  std::string path_;
  std::ofstream file_;
  bool warned_ = false;
};

}  // namespace lockstep::train
