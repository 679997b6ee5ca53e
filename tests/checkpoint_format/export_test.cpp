// Files that are written beside others of the same name.
#include "lockstep/checkpoint/export.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <vector>

#include "checkpoint_format/small_checkpoint.h"
#include "lockstep/checkpoint/safetensors.h"
#include "support/folder.h"

namespace lockstep::test {
namespace {

using checkpoint::Existing;

std::vector<checkpoint::TensorToWrite> tensor_of(const std::vector<float>& values) {
  return {{"a", dtype("F32"), {static_cast<int64_t>(values.size())}, bytes_of(values)}};
}

// The second begins and ends while the first is asked for its bytes.
TEST(Export, TwoToOnePathAreWrittenApart) {
  const Folder folder;
  const std::string path = folder / "net.safetensors";
  const std::vector<float> ones(1000, 1), twos(2000, 2);
  auto first = tensor_of(ones);
  first[0].read = [&] {
    checkpoint::write_file(path, tensor_of(twos), {}, Existing::Replace);
    const checkpoint::Safetensors second(path);
    EXPECT_EQ(second.bytes(second.tensors().at("a")), bytes_of(twos));
    return bytes_of(ones);
  };
  checkpoint::write_file(path, first, {}, Existing::Replace);
  const checkpoint::Safetensors file(path);
  EXPECT_EQ(file.bytes(file.tensors().at("a")), bytes_of(ones));
  EXPECT_THAT(checkpoint::names_in(checkpoint::system_files(), folder.path()),
              testing::ElementsAre("net.safetensors"));
}

}  // namespace
}  // namespace lockstep::test
