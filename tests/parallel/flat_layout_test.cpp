// Where members lie in one flat memory, and how it is cut.
#include "parallel/layout/flat_layout.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include "lockstep/core/error.h"
#include "parallel/layout/flat_memory.h"
#include "support/thrown.h"

namespace lockstep::test {
namespace {

using parallel::FlatLayout;

FlatLayout three() {
  FlatLayout layout(at::kFloat, 64);
  layout.add("a", 5000);
  layout.add("b c%", 1);
  layout.add("d", 3000);
  return layout;
}

TEST(FlatLayout, MembersBeginOnTheAlignment) {
  const FlatLayout layout = three();
  EXPECT_EQ(layout.members()[0].begin, 0);
  EXPECT_EQ(layout.members()[1].begin, 5008);
  EXPECT_EQ(layout.members()[2].begin, 5024);
  EXPECT_EQ(layout.numel(), 5024 + 3008);
}

TEST(FlatLayout, CutsAreOnTheGridOfAMemberAndPortionsCoverIt) {
  const FlatLayout layout = three();
  for (const int64_t parts : {1, 2, 3, 4, 7, 40}) {
    const auto cuts = layout.cuts(parts, 1024);
    ASSERT_EQ(cuts.size(), static_cast<size_t>(parts) + 1);
    std::vector<int64_t> next(3);
    for (int64_t part = 0; part < parts; ++part) {
      EXPECT_LE(cuts[part], cuts[part + 1]);
      for (const auto& [member, range] : layout.portions({cuts[part], cuts[part + 1]})) {
        EXPECT_EQ(range.begin, next[member]);
        EXPECT_EQ(range.begin % 1024, 0);
        next[member] = range.end;
      }
    }
    EXPECT_EQ(next, (std::vector<int64_t>{5000, 1, 3000}));
  }
}

TEST(FlatLayout, PackedMembersHaveNoGaps) {
  FlatLayout layout = FlatLayout::packed(at::kComplexDouble);
  layout.add("a", 3);
  layout.add("none", 0);
  layout.add("b", 1);
  EXPECT_EQ(layout.members()[1].begin, 3);
  EXPECT_EQ(layout.members()[2].begin, 3);
  EXPECT_EQ(layout.numel(), 4);
  EXPECT_EQ(layout.reals(), 8);
}

TEST(FlatLayout, AMemberOfPairsOfRealsIsComplex) {
  FlatLayout layout(at::kComplexFloat, 16);
  layout.add("a", 1);
  layout.add("b", 2);
  const at::Tensor reals = at::arange(layout.reals(), at::kFloat);
  const at::Tensor elements = parallel::as_elements(reals, layout.dtype());
  const at::Tensor b = parallel::member_of(elements, layout, 1);
  EXPECT_EQ(b.numel(), 2);
  EXPECT_EQ(b[1].item<c10::complex<float>>(), c10::complex<float>(6, 7));
  EXPECT_TRUE(b.is_alias_of(reals));
}

TEST(FlatLayout, IsReadBackFromItsText) {
  const FlatLayout layout = three();
  EXPECT_EQ(layout.text(),
            R"({"alignment":64,"dtype":6,"members":[["a",5000],["b c%",1],["d",3000]]})");
  EXPECT_EQ(FlatLayout::parse(layout.text()), layout);
  for (const char* text :
       {"", "[]", R"({"alignment":63,"dtype":6,"members":[]})", R"({"alignment":64,"dtype":999})",
        R"({"alignment":64,"dtype":6,"members":[["a"]]})",
        R"({"alignment":64,"dtype":6,"members":[["a",-1]]})",
        R"({"alignment":64,"dtype":6,"members":[[1,1]]})",
        R"({"alignment":0,"dtype":6,"members":[]})"}) {
    EXPECT_THROW(FlatLayout::parse(text), ConfigError) << text;
  }
}

}  // namespace
}  // namespace lockstep::test
