#include "lockstep/data/csv.h"

#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/stat.h>
#include <torch/torch.h>

#include <cmath>

#include "data/files.h"
#include "lockstep/core/error.h"
#include "lockstep/data/loader.h"

namespace lockstep::test {
namespace {

using data::BadRows;
using data::CsvDataset;
using data::CsvOptions;
using data::MissingValues;
using testing::AllOf;
using testing::ElementsAre;
using testing::HasSubstr;

struct File {
  explicit File(const std::string& text) { write(folder / "t.csv", text); }
  CsvDataset read(const CsvOptions& options = {}) const {
    return CsvDataset(folder / "t.csv", options);
  }
  std::string refused(const CsvOptions& options = {}) const {
    return message_of<Error>([&] { read(options); });
  }
  Folder folder;
};

std::vector<float> values(const at::Tensor& tensor) {
  const auto flat = tensor.contiguous().flatten();
  return {flat.const_data_ptr<float>(), flat.const_data_ptr<float>() + flat.numel()};
}
std::vector<int64_t> numbers(const at::Tensor& tensor) {
  return {tensor.const_data_ptr<int64_t>(), tensor.const_data_ptr<int64_t>() + tensor.numel()};
}

TEST(Csv, FeaturesAndTheLastColumnAsTarget) {
  const File file("a,b,price\n1,2.5,3\r\n -4 ,+5e-1,true\n");
  const auto set = file.read();
  EXPECT_EQ(set.size(), 2);
  EXPECT_THAT(values(set.data()), ElementsAre(1, 2.5F, -4, 0.5F));
  EXPECT_THAT(values(set.target()), ElementsAre(3, 1));
  EXPECT_EQ(set.target().sizes(), (std::vector<int64_t>{2, 1}));
  EXPECT_THAT(set.feature_names(), ElementsAre("a", "b"));
  EXPECT_THAT(set.target_names(), ElementsAre("price"));
  const auto batch = set.get_batch({1, 0, 1});
  EXPECT_THAT(values(batch.data.select(1, 0)), ElementsAre(-4, 1, -4));
}

TEST(Csv, ColumnsByNameAndNumber) {
  const File file("a,b,c,2\n1,2,3,4\n");
  auto set = file.read({.targets = {"b", "0"}, .features = {"2"}});  // a name before a number
  EXPECT_THAT(values(set.data()), ElementsAre(4));
  EXPECT_THAT(values(set.target()), ElementsAre(2, 1));
  set = file.read({.targets = {"a"}});
  EXPECT_THAT(set.feature_names(), ElementsAre("b", "c", "2"));
}

TEST(Csv, QuotesAsRfc4180HasThem) {
  const File file(
      "\xEF\xBB\xBF\"the \"\"first\"\", one\",\"two\nlines\",y\n\"1\",\"2\",\"3\"\n\n\"4\",5,6");
  const auto set = file.read();
  EXPECT_THAT(set.feature_names(), ElementsAre("the \"first\", one", "two\nlines"));
  EXPECT_THAT(values(set.data()), ElementsAre(1, 2, 4, 5));
  EXPECT_EQ(set.line_of(0), 3);
  EXPECT_EQ(set.line_of(1), 5);
}

TEST(Csv, WithoutHeaderAndWithOtherDelimiters) {
  const auto set = File("1;2;3\n4;5;6\n").read({.delimiter = ';', .header = false});
  EXPECT_THAT(values(set.data()), ElementsAre(1, 2, 4, 5));
  EXPECT_THAT(set.feature_names(), ElementsAre("0", "1"));
  EXPECT_THAT(values(File("x\ty\n1\t2").read({.delimiter = '\t'}).target()), ElementsAre(2));
  EXPECT_THAT(File("a;b;c\n1;2;3\n").refused(), HasSubstr("fields may be separated by ';'"));
}

TEST(Csv, Classes) {
  auto set = File("x,y\n1,2\n2,0\n3,2\n").read({.classification = true});
  EXPECT_THAT(numbers(set.target()), ElementsAre(2, 0, 2));
  EXPECT_EQ(set.class_count(), 3);
  EXPECT_THAT(set.class_names(), ElementsAre());
  set = File("x,y\n1,1\n2,-1\n").read({.classification = true});
  EXPECT_THAT(numbers(set.target()), ElementsAre(1, 0));
  EXPECT_THAT(set.class_names(), ElementsAre("-1", "1"));
  set = File("x,y\n1,dog\n2,cat\n3,dog\n").read({.classification = true});
  EXPECT_THAT(numbers(set.target()), ElementsAre(1, 0, 1));
  EXPECT_THAT(set.class_names(), ElementsAre("cat", "dog"));
  const File other("x,y\n1,dog\n");
  const auto test = other.read({.classification = true, .classes = set.class_names()});
  EXPECT_THAT(numbers(test.target()), ElementsAre(1));
  EXPECT_EQ(test.class_count(), 2);
  EXPECT_THAT(other.refused({.classification = true, .classes = {"cat", "cow"}}),
              HasSubstr("t.csv:2: column 'y' (1): 'dog' is not a known class"));
}

TEST(Csv, MissingValues) {
  const File file("a,b,y\n1,,3\n4,NA,6\n7,8,9\n");
  EXPECT_THAT(file.refused(), HasSubstr("t.csv:2: column 'b' (1): '' is missing"));
  const auto set = file.read({.missing_values = MissingValues::Nan});
  EXPECT_TRUE(std::isnan(values(set.data())[1]) && std::isnan(values(set.data())[3]));
  EXPECT_THAT(File("a,y\n1,NA\n").refused({.missing_values = MissingValues::Nan}),
              HasSubstr("column 'y' (1): 'NA' is missing"));  // a target has to be there
}

TEST(Csv, MissingValuesMayBeNumbers) {
  const File file("a,b,y\n-999,0,3\n4,-999.0,0\n,7,9\n");
  CsvOptions options{.missing = {"-999", "NA"}, .missing_values = MissingValues::Nan};
  const auto read = values(file.read(options).data());
  EXPECT_TRUE(std::isnan(read[0]) && std::isnan(read[4]));
  EXPECT_EQ(read[3], -999);  // another text
  options.missing = {"0"};
  EXPECT_THAT(file.refused(options), HasSubstr("t.csv:3: column 'y' (2): '0' is missing"));
  options.missing_values = MissingValues::Bad;
  EXPECT_THAT(file.refused(options), HasSubstr("t.csv:2: column 'b' (1): '0' is missing"));
}

TEST(Csv, BadRowsAreErrorsWithTheirLine) {
  const auto refused = [](const std::string& row) { return File("a,y\n1,2\n" + row).refused(); };
  EXPECT_THAT(refused("3\n"), HasSubstr("t.csv:3: has 1 fields, and the header has 2"));
  EXPECT_THAT(refused("3,4,5\n"), HasSubstr("has 3 fields"));
  EXPECT_THAT(refused("red,4\n"),
              HasSubstr("t.csv:3: column 'a' (0): 'red' is not a number (texts may be classes"));
  EXPECT_THAT(refused("3x,4\n"), HasSubstr("'3x' is not a number"));
  EXPECT_THAT(refused("+-3,4\n"), HasSubstr("'+-3' is not a number"));
  EXPECT_THAT(refused("inf,4\n"), HasSubstr("'inf' is infinite"));
  EXPECT_THAT(refused("1e39,4\n"), HasSubstr("'1e39' is beyond float32"));
  EXPECT_THAT(refused("1e999,4\n"), HasSubstr("'1e999' is infinite"));
  EXPECT_EQ(refused("1e-999,4\n"), "nothing");
  EXPECT_THAT(refused("\"3\"3,4\n"), HasSubstr("text after a closing quote"));
  EXPECT_THAT(refused("3,\"4\"\r5,\"6\"\r"), HasSubstr("its lines end with CR alone"));
  EXPECT_THAT(refused("\"3,4\n5,6\n"), HasSubstr("t.csv:3: a quote that is never closed"));
}

TEST(Csv, AHeaderOfFractionsIsProbablyARow) {
  const auto said = [](const std::string& header) {
    testing::internal::CaptureStderr();
    EXPECT_EQ(File(header + "\n1,2\n").read({}).size(), 1);
    return testing::internal::GetCapturedStderr();
  };
  EXPECT_THAT(said("0.5,1"), HasSubstr("t.csv: the first line is taken for the columns' names"));
  EXPECT_EQ(said("0,1"), "");
  EXPECT_EQ(said("0.5,y"), "");
}

TEST(Csv, BadRowsAreSkippedAndCounted) {
  const File file("a,y\n1,2\nred,3\n4\n5,6\n,7\n8,9");
  const auto set = file.read({.bad_rows = BadRows::Skip});
  EXPECT_THAT(values(set.data()), ElementsAre(1, 5, 8));
  EXPECT_EQ(set.skipped(), 3);
  EXPECT_THAT(set.first_skipped(), HasSubstr("t.csv:3: column 'a' (0): 'red' is not a number"));
  EXPECT_EQ(set.line_of(0), 2);
  EXPECT_EQ(set.line_of(1), 5);
  EXPECT_EQ(set.line_of(2), 7);
  EXPECT_THROW(set.line_of(3), DataError);
  // Not even then is there a next row.
  EXPECT_THAT(File("a,y\n1,2\n\"3,4\n").refused({.bad_rows = BadRows::Skip}),
              HasSubstr("never closed"));
  EXPECT_THAT(File("a,y\nx,y\n").refused({.bad_rows = BadRows::Skip}),
              HasSubstr("no usable row: 1 are bad"));
}

TEST(Csv, FilesAndColumnsThatAreNotThere) {
  const Folder folder;
  const auto refused = [&](const std::string& name) {
    return message_of<DataError>([&] { CsvDataset(folder / name); });
  };
  EXPECT_THAT(refused("none.csv"), AllOf(HasSubstr("[csv]"), HasSubstr("No such file")));
  EXPECT_THAT(refused(""), HasSubstr("is a folder"));
  // Without a writer, which opening would wait for.
  ASSERT_EQ(mkfifo((folder / "pipe.csv").c_str(), 0600), 0);
  EXPECT_THAT(refused("pipe.csv"), HasSubstr("is a pipe or a device"));
  EXPECT_THAT(File("").refused(), HasSubstr("is empty"));
  EXPECT_THAT(File("\n\n").refused(), HasSubstr("has no records"));
  EXPECT_THAT(File("a,b\n").refused(), HasSubstr("has a header and no rows"));
  EXPECT_THAT(File({"\xFF\xFE"
                    "a\0,\0y\0\n\0001\0,\0002\0\n\0",
                    18})
                  .refused(),
              HasSubstr("is a text in UTF-16"));
  EXPECT_THAT(File({"\xFE\xFF\0a\0,\0y\0\n\0001\0,\0002\0\n", 18}).refused(),
              HasSubstr("is a text in UTF-16"));
  EXPECT_THAT(File("a,b\r1,2\r").refused(), HasSubstr("lines end with CR alone"));
  const File file("width,height,width\n1,2,3\n");
  EXPECT_THAT(file.refused({.targets = {"hieght"}}), HasSubstr("did you mean 'height'?"));
  EXPECT_THAT(file.refused({.targets = {"width"}}), HasSubstr("2 columns are called 'width'"));
  EXPECT_THAT(file.refused({.targets = {"0"}, .features = {"0"}}), HasSubstr("is chosen twice"));
  EXPECT_THAT(file.refused({.targets = {"3"}}), HasSubstr("has no column '3'"));
  EXPECT_THAT(file.refused({.targets = {"0", "1"}, .classification = true}),
              HasSubstr("one target column"));
  EXPECT_THAT(file.refused({.classes = {"a"}}), HasSubstr("without classification"));
  EXPECT_THAT(file.refused({.classification = true, .classes = {"a", "b", "a"}}),
              HasSubstr("the class 'a' is given twice"));
  EXPECT_THAT(file.refused({.delimiter = '"'}), HasSubstr("delimiter cannot be"));
}

TEST(Csv, NumbersAreTheNearestFloats) {
  std::string text = "x,y\n";
  const auto expected = torch::rand({500}, torch::TensorOptions().dtype(at::kDouble)) * 1e3;
  for (int i = 0; i < 500; ++i) text += fmt::format("{},{}\n", expected[i].item<double>(), i);
  const File file(text);
  EXPECT_TRUE(at::equal(file.read().data().flatten(), expected.to(at::kFloat)));
}

}  // namespace
}  // namespace lockstep::test
