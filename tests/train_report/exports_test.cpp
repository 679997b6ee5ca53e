// What other programs read of a run: TensorBoard's event files, OpenMetrics.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstring>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <string>

#include "lockstep/core/error.h"
#include "lockstep/train/open_metrics.h"
#include "lockstep/train/tensorboard.h"
#include "support/folder.h"

namespace lockstep::train {
namespace {

using ::testing::HasSubstr;
using ::testing::Not;

StepReport report() {
  return {.step = 300,
          .loss = 0.5,
          .samples = 1280,
          .samples_per_second = 640.5,
          .values = {{"temperature", 2}},
          .ranks = {{0.02, 0.005, 0.001, 0, 1024}, {0.02, 0, 0, 0, 2048}}};
}

TEST(TensorBoard, ChecksumsAreThoseOfTfRecords) {
  // RFC 3720's check value of CRC-32C is 0xe3069283 for "123456789".
  const uint32_t crc = 0xe3069283;
  EXPECT_EQ(masked_crc("123456789"), ((crc >> 15) | (crc << 17)) + 0xa282ead8);
}

TEST(TensorBoard, ARecordIsAnEventWithOneScalar) {
  const std::string record = scalar_record("a", 1.0, 300, 2.0);
  const std::string event = std::string("\x09\0\0\0\0\0\0\0\x40", 9) + "\x10\xac\x02" +
                            std::string("\x2a\x0a\x0a\x08", 4) + std::string("\x0a\x01", 2) + "a" +
                            std::string("\x15\0\0\x80\x3f", 5);
  ASSERT_EQ(record.size(), 12 + event.size() + 4);
  uint64_t length = 0;
  std::memcpy(&length, record.data(), 8);
  EXPECT_EQ(length, event.size());
  EXPECT_EQ(record.substr(12, event.size()), event);
  uint32_t crc = 0;
  std::memcpy(&crc, record.data() + 12 + event.size(), 4);
  EXPECT_EQ(crc, masked_crc(event));
}

TEST(TensorBoard, AFileBeginsBehindTheStepThatTheRunGoesOnFrom) {
  const test::Folder folder;
  { TensorBoardWriter writer(folder.path(), 300); }
  const auto file = std::filesystem::directory_iterator(folder.path())->path();
  const std::string head = scalar_record("", 0, 0, 0), start = start_record(301, 0);
  const std::string all = test::contents(file.string());
  ASSERT_EQ(all.size(), head.size() + start.size());
  // Behind the time: step 301, and a session that starts.
  EXPECT_EQ(start.substr(12 + 9, 7), std::string("\x10\xad\x02\x3a\x02\x08\x01", 7));
  EXPECT_EQ(all.substr(head.size() + 12 + 9, 7), start.substr(12 + 9, 7));
}

// A job that is started again before it has saved anything begins again, too.
TEST(TensorBoard, AFileOfARunThatBeginsTakesTheStepsOfEarlierFiles) {
  const test::Folder folder;
  { TensorBoardWriter writer(folder.path()); }
  const auto file = std::filesystem::directory_iterator(folder.path())->path();
  const std::string head = scalar_record("", 0, 0, 0), start = start_record(0, 0);
  const std::string all = test::contents(file.string());
  ASSERT_EQ(all.size(), head.size() + start.size());
  EXPECT_EQ(all.substr(head.size() + 12 + 9, 6), std::string("\x10\0\x3a\x02\x08\x01", 6));
}

TEST(TensorBoard, AFileHasAllOfAReport) {
  const test::Folder folder;
  {
    TensorBoardWriter writer(folder / "deep/er");
    writer.report(report());
    writer.evaluation({.step = 300, .metrics = {{"accuracy", 0.75}}});
  }
  const auto file = std::filesystem::directory_iterator(folder / "deep/er")->path();
  EXPECT_THAT(file.filename().string(), HasSubstr("events.out.tfevents."));
  std::ifstream in(file, std::ios::binary);
  const std::string bytes{std::istreambuf_iterator<char>(in), {}};
  size_t records = 0;
  for (size_t at = 0; at < bytes.size(); ++records) {
    uint64_t length = 0;
    std::memcpy(&length, bytes.data() + at, 8);
    at += 12 + length + 4;
    ASSERT_LE(at, bytes.size());
  }
  EXPECT_EQ(records, 2u + 4 + 2 * 4 + 1);
  for (const char* const tag : {"brain.Event:2", "train/loss", "values/temperature",
                                "memory_bytes/rank 1", "evaluation/accuracy"}) {
    EXPECT_THAT(bytes, HasSubstr(tag));
  }
}

TEST(TensorBoard, TheLossIsTheMeanOfTheSteps) {
  const test::Folder folder;
  StepReport mean = report();
  mean.loss = 99;
  mean.mean_loss = 0.25;
  TensorBoardWriter(folder.path()).report(mean);
  std::ifstream in(std::filesystem::directory_iterator(folder.path())->path(), std::ios::binary);
  const std::string bytes{std::istreambuf_iterator<char>(in), {}};
  float value = 0;
  std::memcpy(&value, bytes.data() + bytes.find("train/loss") + 10 + 1, sizeof value);
  EXPECT_EQ(value, 0.25f);
}

TEST(TensorBoard, AFolderThatCannotBeMadeIsAnError) {
  EXPECT_THROW(TensorBoardWriter("/proc/none"), Error);
}

TEST(OpenMetrics, HasFamiliesWithTypesAndLabelsThatAreQuoted) {
  const std::string text = open_metrics(report(), "a\"b\\c\n");
  EXPECT_THAT(text, HasSubstr("# TYPE lockstep_loss gauge\n# HELP lockstep_loss Mean loss"));
  EXPECT_THAT(text, HasSubstr("lockstep_loss{run=\"a\\\"b\\\\c\\n\"} 0.5\n"));
  EXPECT_THAT(text, HasSubstr("# TYPE lockstep_samples gauge\n"));
  EXPECT_THAT(text, HasSubstr("lockstep_samples{run=\"a\\\"b\\\\c\\n\"} 1280\n"));
  EXPECT_THAT(text, HasSubstr("rank=\"0\",kind=\"communication\"} 0.005\n"));
  EXPECT_THAT(text, HasSubstr("rank=\"1\"} 2048\n"));
  EXPECT_THAT(text, Not(HasSubstr("gpu_busy")));
  StepReport on_gpus = report();
  on_gpus.ranks[1].gpu_busy = 0.5;
  EXPECT_THAT(
      open_metrics(on_gpus, "a"),
      HasSubstr("# TYPE lockstep_gpu_busy gauge\n# HELP lockstep_gpu_busy Share of the time "
                "the GPU computes.\nlockstep_gpu_busy{run=\"a\",rank=\"1\"} 0.5\n"));
  EXPECT_TRUE(text.ends_with("# EOF\n"));
  // Prometheus and protobuf take UTF-8 only.
  EXPECT_THAT(open_metrics(report(), "sch\xc3\xb6n\xff"), HasSubstr("run=\"sch\xc3\xb6n\ufffd\""));
  EXPECT_THAT(scalar_record("sch\xc3\xb6n\xff", 1, 1, 0), HasSubstr("sch\xc3\xb6n\ufffd"));
}

TEST(OpenMetrics, TheLossIsTheMeanOfTheSteps) {
  StepReport mean = report();
  mean.loss = 99;
  mean.mean_loss = 0.25;
  EXPECT_THAT(open_metrics(mean, "a"), HasSubstr("lockstep_loss{run=\"a\"} 0.25\n"));
}

TEST(OpenMetrics, AFileIsReplacedAsAWhole) {
  const test::Folder folder;
  EXPECT_TRUE(write_open_metrics(folder / "lockstep.prom", report(), "a"));
  EXPECT_TRUE(write_open_metrics(folder / "lockstep.prom", report(), "a"));
  EXPECT_EQ(std::distance(std::filesystem::directory_iterator(folder.path()), {}), 1);
  EXPECT_FALSE(write_open_metrics("/proc/none/x", report(), "a"));
}

}  // namespace
}  // namespace lockstep::train
