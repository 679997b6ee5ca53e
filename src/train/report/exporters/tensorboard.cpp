#include "lockstep/train/tensorboard.h"

#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <filesystem>

#include "core/process/standard_streams.h"
#include "lockstep/core/error.h"
#include "lockstep/core/log.h"
#include "lockstep/text/utf8.h"
#include "train/report/text.h"

namespace lockstep::train {
namespace {

constexpr size_t kMostRanks = 8;

std::array<uint32_t, 256> crc_table() {
  std::array<uint32_t, 256> table{};
  for (uint32_t i = 0; i < 256; ++i) {
    uint32_t value = i;
    for (int bit = 0; bit < 8; ++bit) value = (value >> 1) ^ (value & 1 ? 0x82f63b78u : 0u);
    table[i] = value;
  }
  return table;
}

// Numbers of fixed size are little-endian in both formats, as they are on the processors we run on.
static_assert(std::endian::native == std::endian::little);
template <class Number>
std::string fixed(Number number) {
  std::string bytes(sizeof number, '\0');
  std::copy_n(reinterpret_cast<const char*>(&number), sizeof number, bytes.begin());
  return bytes;
}

// Protobuf's: fields are a key, (number << 3) | kind, and a value.
std::string varint(uint64_t number) {
  std::string bytes;
  for (; number >= 0x80; number >>= 7) bytes += static_cast<char>((number & 0x7f) | 0x80);
  return bytes + static_cast<char>(number);
}
std::string text_field(char key, std::string_view text) {
  return key + varint(text.size()) + std::string(text);
}

constexpr char kWallTime = 0x09, kStep = 0x10, kFileVersion = 0x1a, kSummary = 0x2a,
               kSession = 0x3a;                    // of Event
constexpr std::string_view kStart("\x08\x01", 2);  // a Session
constexpr char kValue = 0x0a;                      // of Summary
constexpr char kTag = 0x0a, kSimpleValue = 0x15;   // of Value

}  // namespace

uint32_t masked_crc(std::string_view bytes) {
  static const std::array<uint32_t, 256> table = crc_table();
  uint32_t crc = 0xffffffffu;
  for (const char byte : bytes) crc = (crc >> 8) ^ table[(crc ^ static_cast<uint8_t>(byte)) & 0xff];
  crc = ~crc;
  return ((crc >> 15) | (crc << 17)) + 0xa282ead8u;
}

namespace {

std::string record_of(const std::string& event) {
  const std::string length = fixed(static_cast<uint64_t>(event.size()));
  return length + fixed(masked_crc(length)) + event + fixed(masked_crc(event));
}

}  // namespace

std::string start_record(int64_t step, double unix_seconds) {
  return record_of(kWallTime + fixed(unix_seconds) + kStep + varint(static_cast<uint64_t>(step)) +
                   text_field(kSession, kStart));
}

std::string scalar_record(std::string_view tag, double value, int64_t step, double unix_seconds) {
  std::string event = kWallTime + fixed(unix_seconds);
  if (tag.empty()) {
    event += text_field(kFileVersion, "brain.Event:2");
  } else {
    event += kStep + varint(static_cast<uint64_t>(step));
    const std::string scalar =
        text_field(kTag, text::valid_utf8(tag)) + kSimpleValue + fixed(static_cast<float>(value));
    event += text_field(kSummary, text_field(kValue, scalar));
  }
  return record_of(event);
}

TensorBoardWriter::TensorBoardWriter(const std::string& folder, int64_t resumed_at) {
  std::error_code ignored;  // opening says it better
  std::filesystem::create_directories(folder, ignored);
  char host[256] = {};
  if (gethostname(host, sizeof host - 1) != 0) host[0] = '\0';
  path_ = fmt::format("{}/events.out.tfevents.{:.0f}.{}.{}", folder, std::floor(unix_now()), host,
                      getpid());
  open_standard_streams();
  file_.open(path_, std::ios::binary | std::ios::app);
  if (!file_) throw Error(fmt::format("[tensorboard] cannot write {}: name another folder", path_));
  write(scalar_record("", 0, 0, unix_now()));
  // Also of a run that begins: a job that had saved nothing yet begins again from step 1.
  write(start_record(std::max<int64_t>(resumed_at, -1) + 1, unix_now()));
  flush();
}

void TensorBoardWriter::write(const std::string& record) {
  file_.write(record.data(), static_cast<std::streamsize>(record.size()));
}

void TensorBoardWriter::scalar(std::string_view tag, double value, int64_t step) {
  write(scalar_record(tag, value, step, unix_now()));
}

void TensorBoardWriter::flush() {
  file_.flush();
  if (file_ || warned_) return;
  warned_ = true;
  log::warn(fmt::format(
      "[tensorboard] {} takes no more: training continues without; make room on that disk", path_));
}

void TensorBoardWriter::report(const StepReport& report) {
  const auto add = [&](const char* tag, const std::optional<double>& value) {
    if (value) scalar(tag, *value, report.step);
  };
  add("train/loss", report.shown_loss());
  add("train/learning_rate", report.learning_rate);
  add("train/gradient_norm", report.gradient_norm);
  add("train/epoch", static_cast<double>(report.epoch));
  add("system/samples_per_second", report.samples_per_second);
  for (const auto& [name, value] : report.values) scalar("values/" + name, value, report.step);
  for (size_t rank = 0; rank < std::min(report.ranks.size(), kMostRanks); ++rank) {
    const RankFigures& figures = report.ranks[rank];
    const auto of_rank = [&](const char* name, double value) {
      scalar(fmt::format("{}/rank {}", name, rank), value, report.step);
    };
    of_rank("working_seconds", figures.working_seconds());
    of_rank("communication_seconds", figures.communication_seconds);
    of_rank("data_seconds", figures.data_seconds);
    of_rank("memory_bytes", static_cast<double>(figures.memory_bytes));
    if (figures.gpu_busy >= 0) of_rank("gpu_busy", figures.gpu_busy);
  }
  flush();
}

void TensorBoardWriter::evaluation(const EvaluationReport& evaluation) {
  for (const auto& [name, value] : evaluation.metrics) {
    scalar("evaluation/" + name, value, evaluation.step);
  }
  flush();
}

}  // namespace lockstep::train
