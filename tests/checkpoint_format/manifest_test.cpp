#include "lockstep/checkpoint/manifest.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <nlohmann/json.hpp>

#include "checkpoint/format/checksum.h"
#include "lockstep/checkpoint/error.h"
#include "support/thrown.h"

namespace lockstep::test {
namespace {

using checkpoint::Manifest;
using checkpoint::manifest_from;
using checkpoint::manifest_head_from;
using checkpoint::to_json;
using testing::HasSubstr;

Manifest sample() {
  constexpr double kInfinity = std::numeric_limits<double>::infinity();
  Manifest manifest{.step = 1200, .save = 7, .world = 2};
  manifest.metrics["loss"] = 0.1;
  manifest.values = {{"on", true},
                     {"count", int64_t{-3}},
                     {"most", std::numeric_limits<int64_t>::max()},
                     {"lr", 0.1},
                     {"one", 1.0},
                     {"best", -kInfinity},
                     {"text", std::string("a \"b\"\n")},
                     {"list", std::vector<int64_t>{1, 2}},
                     {"none", std::vector<int64_t>{}},
                     {"rates", std::vector<double>{1.0, kInfinity}}};
  manifest.files["a.safetensors"] = {96, 0x123456789abcdef0};
  manifest.tensors["w"] = {"F32", {2}, {{{{0}, {2}}, "a.safetensors", "w", 5}}};
  manifest.tensors["scalar"] = {"C128", {}, {{{{}, {}}, "a.safetensors", "scalar", 6}}};
  manifest.aliases["tied"] = "w";
  return manifest;
}

TEST(Manifest, ComesBack) {
  const Manifest manifest = sample(), read = manifest_from(to_json(manifest), "x");
  EXPECT_EQ(read.step, 1200);
  EXPECT_EQ(read.save, 7);
  EXPECT_EQ(read.world, 2);
  EXPECT_EQ(read.metrics, manifest.metrics);
  EXPECT_EQ(read.values, manifest.values);
  EXPECT_EQ(read.aliases, manifest.aliases);
  EXPECT_EQ(read.files.at("a.safetensors").checksum, 0x123456789abcdef0u);
  EXPECT_EQ(read.tensors.at("w").boxes.at(0).box, manifest.tensors.at("w").boxes.at(0).box);
  EXPECT_EQ(read.tensors.at("scalar").dtype, "C128");
  EXPECT_EQ(to_json(read), to_json(manifest));
}

// As a library of JSON lays it out, with one space for each level.
TEST(Manifest, IsLaidOutAsAnyJson) {
  Manifest manifest = sample();
  manifest.tensors["a \"b\"\n\u00e9\x7f"] = {
      "F16",
      {2, 3},
      {{{{0, 0}, {1, 3}}, "a.safetensors", "a\\", 7}, {{{1, 0}, {1, 3}}, "b", "a", 8}}};
  manifest.tensors["none"] = {"F32", {0}, {}};
  for (;; manifest.tensors.clear()) {
    const std::string text = to_json(manifest);
    EXPECT_EQ("{\n " + text.substr(1), nlohmann::ordered_json::parse(text).dump(1) + "\n");
    if (manifest.tensors.empty()) break;
  }
}

TEST(Manifest, TheHeadIsReadAlone) {
  Manifest manifest = sample();
  manifest.metrics["odd \",\n \"values\": {"] = -1;
  const std::string text = to_json(manifest);
  const Manifest head = manifest_head_from(text, "x");
  EXPECT_EQ(head.step, 1200);
  EXPECT_EQ(head.save, 7);
  EXPECT_EQ(head.world, 2);
  EXPECT_EQ(head.metrics, manifest.metrics);
  EXPECT_TRUE(head.values.empty() && head.files.empty() && head.tensors.empty());

  // All of the file counts for the checksum.
  for (size_t at = 0; at < text.size(); at += 7) {
    std::string damaged = text;
    damaged[at] ^= 1;
    EXPECT_THROW(manifest_head_from(damaged, "x"), CheckpointError) << at;
  }
}

// As another program may write it: a line, in another order.
TEST(Manifest, TheHeadIsReadInAnyOrder) {
  nlohmann::json json = nlohmann::json::parse(to_json(sample()));
  json["xxh3"] = "0000000000000000";
  std::string text = json.dump();
  const std::string own = "\"xxh3\":\"0000000000000000\"";
  text =
      "{\"xxh3\": \"0000000000000000\"," + text.erase(text.find(own) - 1, own.size() + 1).substr(1);
  text.replace(10, 16, checkpoint::hex(checkpoint::checksum(text)));
  EXPECT_EQ(manifest_head_from(text, "x").step, 1200);
  EXPECT_EQ(manifest_head_from(text, "x").metrics, sample().metrics);
}

TEST(Manifest, ANanComesBack) {
  Manifest manifest;
  manifest.values["x"] = std::nan("");
  EXPECT_TRUE(std::isnan(std::get<double>(manifest_from(to_json(manifest), "x").values.at("x"))));
}

// `text` with `from` replaced and the checksum made right again.
std::string edited(std::string text, const std::string& from, const std::string& to) {
  const size_t at = text.find(from);
  EXPECT_NE(at, std::string::npos) << from;
  text.replace(at, from.size(), to);
  text.replace(10, 16, "0000000000000000");
  return text.replace(10, 16, checkpoint::hex(checkpoint::checksum(text)));
}

std::string fault_of_manifest(const std::string& text) {
  return message_of<CheckpointError>([&] { manifest_from(text, "[x] file"); });
}

TEST(Manifest, AnyBitMatters) {
  const std::string text = to_json(sample());
  for (size_t i = 0; i < text.size() * 8; ++i) {
    std::string flipped = text;
    flipped[i / 8] = static_cast<char>(flipped[i / 8] ^ 1 << i % 8);
    ASSERT_THAT(fault_of_manifest(flipped), HasSubstr("[x] file: is damaged")) << "bit " << i;
  }
  EXPECT_THAT(fault_of_manifest(text + " "), HasSubstr("is damaged"));
  EXPECT_THAT(fault_of_manifest(text.substr(0, text.size() - 1)), HasSubstr("is damaged"));
  EXPECT_THAT(fault_of_manifest(""), HasSubstr("is damaged"));
}

TEST(Manifest, AnotherVersionIsNamed) {
  const std::string text = to_json(sample());
  EXPECT_THAT(fault_of_manifest(edited(text, "\"version\": 1", "\"version\": 2")),
              HasSubstr("is of version 2, and this program reads version 1"));
  EXPECT_THAT(fault_of_manifest("{\"format\": \"lockstep-checkpoint\", \"version\": 3}"),
              HasSubstr("is of version 3"));
  EXPECT_THAT(fault_of_manifest(edited(text, "lockstep-checkpoint", "lockstep-checkpoins")),
              HasSubstr("format is not"));
}

TEST(Manifest, ContradictionsAreNamed) {
  const std::string text = to_json(sample());
  const auto with = [&](const char* from, const char* to) {
    return fault_of_manifest(edited(text, from, to));
  };
  EXPECT_THAT(with("\"step\": 1200", "\"step\": -1"), HasSubstr("step is not a whole number"));
  EXPECT_THAT(with("\"step\": 1200,", ""), HasSubstr("has no step"));
  EXPECT_THAT(with("\"C128\"", "\"C1\""), HasSubstr("tensor 'scalar' has the unknown dtype 'C1'"));
  EXPECT_THAT(with("\"tied\": \"w\"", "\"tied\": \"v\""), HasSubstr("another name of nothing"));
  EXPECT_THAT(with("\"a.safetensors\": {", "\"../a\": {"), HasSubstr("names a file '../a'"));
  EXPECT_THAT(with("\"file\": \"a.safetensors\"", "\"file\": \"b.safetensors\""),
              HasSubstr("not listed"));
  EXPECT_THAT(with("\"xxh3\": \"0000000000000005\"", "\"xxh3\": \"000000000000000G\""),
              HasSubstr("checksum"));
  EXPECT_THAT(with("\"lr\": 0.1", "\"lr\": {}"), HasSubstr("the value 'lr' is not a number"));
  EXPECT_THAT(with("\"lr\": 0.1", "\"step\": 1, \"step\": 2"), HasSubstr("'step' comes twice"));
  std::string gap = text;
  gap[gap.find('2', gap.find("\"size\": [\n"))] = '1';
  EXPECT_THAT(fault_of_manifest(edited(gap, "1200", "1201")),
              HasSubstr("the boxes of tensor 'w' do not cover it once: 1 of 2 elements"));
}

TEST(Manifest, ANameThatIsNoTextIsRefused) {
  Manifest manifest;
  manifest.values["\xff"] = true;
  EXPECT_THAT(message_of<CheckpointError>([&] { to_json(manifest); }), HasSubstr("not UTF-8"));
}

}  // namespace
}  // namespace lockstep::test
