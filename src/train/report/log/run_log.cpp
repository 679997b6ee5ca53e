// Writing the log.
#include "lockstep/train/run_log.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <filesystem>
#include <utility>

#include "core/counted.h"
#include "core/process/standard_streams.h"
#include "lockstep/core/error.h"
#include "lockstep/core/log.h"
#include "train/report/log/file.h"
#include "train/report/log/record_queue.h"

namespace lockstep::train {
namespace {

// Whether the file's last byte is that of a whole line; an empty file's is.
bool ends_whole(int fd) {
  const off_t size = lseek(fd, 0, SEEK_END);
  char last = '\n';
  return size <= 0 || pread(fd, &last, 1, size - 1) != 1 || last == '\n';
}

}  // namespace

LogFile::LogFile(std::string path) : path_(std::move(path)) {
  open_standard_streams();
  std::error_code ignored;  // open() says it better
  const auto folder = std::filesystem::path(path_).parent_path();
  if (!folder.empty()) std::filesystem::create_directories(folder, ignored);
  file_ = Fd(open(path_.c_str(), O_RDWR | O_CREAT | O_APPEND | O_CLOEXEC, 0666));
  if (!file_) {
    throw Error(fmt::format("[metrics] cannot write {}: {}: name another file or folder", path_,
                            std::strerror(errno)));
  }
  ends_whole_ = ends_whole(file_.get());
}

bool LogFile::write_all(std::string_view bytes) {
  while (!bytes.empty()) {
    const ssize_t count = write(file_.get(), bytes.data(), bytes.size());
    if (count < 0 && errno == EINTR) continue;
    if (count <= 0) return false;
    ends_whole_ = bytes[static_cast<size_t>(count) - 1] == '\n';
    bytes.remove_prefix(static_cast<size_t>(count));
  }
  return true;
}

// Whether all of it is there.
bool LogFile::write_line(const std::string& line) {
  if (!ends_whole_ && !write_all("\n")) return false;
  return write_all(line + "\n");
}

void LogFile::warn() {
  if (std::exchange(has_warned_, true)) return;
  log::warn(
      fmt::format("[metrics] {} takes no more lines ({}); training continues without: make "
                  "room on that disk",
                  path_, std::strerror(errno)));
}

void LogFile::take(const LogRecord& record, double unix_seconds, uint64_t missing) {
  missing_ += missing;
  if (missing_ > 0) {
    const Event event{.kind = "warning",
                      .text = fmt::format("{} of this log {} missing here",
                                          lockstep::counted(static_cast<int64_t>(missing_), "line"),
                                          missing_ == 1 ? "is" : "are"),
                      .advice = "Make room on the log's disk, or log less often."};
    if (write_line(log_line(event, unix_seconds))) missing_ = 0;
  }
  if (write_line(log_line(record, unix_seconds))) return;
  warn();
  ++missing_;
}

RunLog::RunLog(const std::string& path) {
  auto file = std::make_shared<LogFile>(path);
  queue_ = std::make_unique<RecordQueue>(
      [file](const LogRecord& record, double unix_seconds, uint64_t missing) {
        file->take(record, unix_seconds, missing);
      });
}

RunLog::~RunLog() = default;

void RunLog::append(LogRecord record) { queue_->append(std::move(record)); }

bool RunLog::flush(std::chrono::milliseconds timeout) { return queue_->flush(timeout); }

}  // namespace lockstep::train
