#include "lockstep/data/npy.h"

#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <cstdlib>

#include "data/files.h"
#include "lockstep/core/error.h"

namespace lockstep::test {
namespace {

using testing::HasSubstr;

at::Tensor expected(const std::string& dtype, at::ScalarType type) {
  at::Tensor base = torch::arange(24).view({2, 3, 4});
  if (dtype == "bool") return base.remainder(2).to(at::kBool);
  if (dtype[0] != 'u') base -= 5;
  at::Tensor array = base.to(type);
  if (dtype == "uint16") array[0][0][0] = 65535;
  if (dtype == "uint32") array[0][0][0] = int64_t{4294967295};
  if (dtype.starts_with("complex")) array = array * c10::complex<double>(1, 2);
  return array.to(type);
}

class Npy : public testing::Test {
 protected:
  static void SetUpTestSuite() {
    folder = new Folder;
    ASSERT_EQ(std::system(fmt::format("{} {}/tests/data/npy_cases.py {}", LOCKSTEP_PEERS_PYTHON,
                                      LOCKSTEP_SOURCE_DIR, folder->path())
                              .c_str()),
              0);
  }
  static void TearDownTestSuite() { delete std::exchange(folder, nullptr); }

  static std::string refused(const std::string& name) {
    return message_of<DataError>([&] { read_npy(*folder / name); });
  }
  static std::string refused_bytes(const std::string& bytes) {
    write(*folder / "damaged.npy", bytes);
    return refused("damaged.npy");
  }

  static inline Folder* folder = nullptr;
};

TEST_F(Npy, AllDtypesOrdersAndVersions) {
  const std::map<std::string, at::ScalarType> dtypes{{"bool", at::kBool},
                                                     {"int8", at::kChar},
                                                     {"int16", at::kShort},
                                                     {"int32", at::kInt},
                                                     {"int64", at::kLong},
                                                     {"uint8", at::kByte},
                                                     {"uint16", at::kInt},
                                                     {"uint32", at::kLong},
                                                     {"uint64", at::kLong},
                                                     {"float16", at::kHalf},
                                                     {"float32", at::kFloat},
                                                     {"float64", at::kDouble},
                                                     {"complex64", at::kComplexFloat},
                                                     {"complex128", at::kComplexDouble}};
  for (const auto& [dtype, type] : dtypes) {
    const at::Tensor wanted = expected(dtype, type);
    for (const char* order : {"Cl", "Cb", "Fl", "Fb"}) {
      for (const int version : {1, 2, 3}) {
        const std::string name = fmt::format("{}-{}{}.npy", dtype, order, version);
        const at::Tensor array = read_npy(*folder / name);
        EXPECT_EQ(array.scalar_type(), type) << name;
        EXPECT_TRUE(at::equal(array, wanted)) << name;
        EXPECT_TRUE(array.is_contiguous()) << name;
      }
    }
  }
  EXPECT_EQ(read_npy(*folder / "scalar.npy").item<float>(), 7);
  EXPECT_EQ(read_npy(*folder / "empty.npy").sizes(), (std::vector<int64_t>{0, 3}));
}

TEST_F(Npy, AsDataAndTargets) {
  const NpyDataset set(*folder / "uint8-Cl1.npy", *folder / "labels.npy");
  EXPECT_EQ(set.size(), 2);
  const auto batch = set.get_batch({1});
  EXPECT_EQ(batch.data.scalar_type(), at::kFloat);
  EXPECT_EQ(batch.data.sizes(), (std::vector<int64_t>{1, 3, 4}));
  EXPECT_EQ(batch.target.scalar_type(), at::kLong);
  EXPECT_EQ(batch.target.item<int64_t>(), 0);
  const auto refused_set = [&](const char* data, const char* target) {
    return message_of<DataError>([&] { NpyDataset(*folder / data, *folder / target); });
  };
  EXPECT_THAT(refused_set("empty.npy", "labels.npy"), HasSubstr("[0, 3] has no samples"));
  EXPECT_THAT(refused_set("scalar.npy", "labels.npy"), HasSubstr("no samples along"));
  EXPECT_THAT(refused_set("complex64-Cl1.npy", "labels.npy"), HasSubstr("complex data"));
  write(*folder / "three.npy", "");
  EXPECT_THAT(refused_set("labels.npy", "three.npy"), HasSubstr("is empty"));
}

TEST_F(Npy, RefusesWhatIsNoArrayOfNumbers) {
  EXPECT_THAT(refused("objects.npy"), HasSubstr("elements of dtype '|O' are not supported"));
  EXPECT_THAT(refused("texts.npy"), HasSubstr("'<U1' are not supported"));
  EXPECT_THAT(refused("fields.npy"), HasSubstr("structured elements"));
  EXPECT_THAT(refused("long_double.npy"), HasSubstr("'<f16' are not supported"));
  EXPECT_THAT(refused("large.npy"), HasSubstr("beyond 2^63"));
  EXPECT_THAT(refused("both.npz"), HasSubstr("is an archive"));
  EXPECT_THAT(refused("none.npy"), HasSubstr("No such file"));
  EXPECT_THAT(refused_bytes("hello"), HasSubstr("is not an .npy file"));
}

TEST_F(Npy, DamagedFiles) {
  const std::string good = contents(*folder / "float32-Cl1.npy");
  for (size_t length = 0; length < good.size(); ++length) {
    EXPECT_THAT(refused_bytes(good.substr(0, length)), HasSubstr("[npy] ")) << length;
  }
  EXPECT_THAT(refused_bytes(good + "x"), HasSubstr("too long: 2 x 3 x 4"));
  const auto with = [&](const std::string& from, const std::string& to) {
    std::string bytes = good;
    bytes.replace(bytes.find(from), from.size(), to);
    return refused_bytes(bytes);
  };
  EXPECT_THAT(with("(2, 3, 4)", "(9, 9, 9)"), HasSubstr("truncated, or a wrong shape: 9 x 9 x 9"));
  EXPECT_THAT(with("(2, 3, 4), }          ", "(9223372036854775807,2)}"), HasSubstr("[npy] "));
  // No elements, of a size that nothing has.
  std::string none = good.substr(0, good.size() - 24 * sizeof(float));
  none.replace(none.find("(2, 3, 4), }"), 40,
               fmt::format("{:40}", "(0, 4294967296, 4294967296, 4)}"));
  EXPECT_THAT(refused_bytes(none), HasSubstr("a wrong shape: 0 x 4294967296 x 4294967296 x 4"));
  EXPECT_THAT(with("False", "Maybe"), HasSubstr("neither True nor False"));
  EXPECT_THAT(with("shape", "shapf"), HasSubstr("unknown key 'shapf'"));
  EXPECT_THAT(with("(2, 3, 4)", "(-2,-3,4)"), HasSubstr("no such size"));
  EXPECT_THAT(with(std::string("\x01\x00", 2), std::string("\x07\x00", 2)),
              HasSubstr("is of version 7.0"));
}

}  // namespace
}  // namespace lockstep::test
