// Sums in steps over NUMA nodes: which node, the bits, what moves between nodes.
#include "comm/shm/numa_nodes.h"

#include <gmock/gmock.h>

#include <filesystem>
#include <fstream>
#include <map>
#include <random>

#include "comm/host/numa_node.h"
#include "comm/shm/exchange.h"
#include "support/folder.h"

namespace lockstep::comm {
namespace {

using Layout = std::vector<int>;

TEST(NumaNode, IsTheOneWithAllCores) {
  const test::Folder folder;
  const auto node = [&](int number, const std::string& cores) {
    const std::filesystem::path path =
        folder / ("sys/devices/system/node/node" + std::to_string(number));
    std::filesystem::create_directories(path);
    std::ofstream(path / "cpulist") << cores << "\n";
  };
  EXPECT_EQ(numa_node_of({0, 1}, folder.path()), std::nullopt);
  node(0, "0-1,4-5");
  EXPECT_EQ(numa_node_of({0, 1}, folder.path()), std::nullopt) << "the only one";
  node(10, "2,3,6-7");
  node(11, "");  // has memory alone
  std::ofstream(folder / "sys/devices/system/node/online") << "0,10-11\n";
  EXPECT_EQ(numa_node_of({0, 1, 4, 5}, folder.path()), 0);
  EXPECT_EQ(numa_node_of({3, 6}, folder.path()), 10);
  EXPECT_EQ(numa_node_of({0, 2}, folder.path()), std::nullopt) << "of both";
  EXPECT_EQ(numa_node_of({}, folder.path()), std::nullopt);
}

TEST(NumaNodes, HelpWhereTheyMoveAThird) {
  const auto helps = [](const Layout& layout) {
    const NumaNodes nodes(layout, 0);
    return std::pair(nodes.help_all_reduce(), nodes.help_reduce_scatter());
  };
  const std::pair both(true, true), none(false, false);
  EXPECT_EQ(helps({0, 0, 0, 0, 1, 1, 1, 1}), both);
  EXPECT_EQ(helps({0, 0, 0, 0, 1, 1, 1}), both);
  EXPECT_EQ(helps({1, 1, 1, 1, 1, 1, 1, 1}), none);
  EXPECT_EQ(helps({0, 0, 0, 0, 1, 1, 1, -1}), none) << "unknown";
  EXPECT_EQ(helps({0, 1, 0, 1, 0, 1, 0, 1}), none) << "no two ranks are a node of the tree";
  EXPECT_EQ(helps({0, 0, 1, 1}), none);
  EXPECT_EQ(helps({0}), none);
  // What a rank of 8 takes from the other node in a reduce_scatter: one sum in place of four
  // inputs.
  const NumaNodes nodes({0, 0, 0, 0, 1, 1, 1, 1}, 5);
  EXPECT_EQ(std::ranges::count_if(nodes.taken(), [](const auto& one) { return one.index >= 0; }),
            1);
}

// All layouts, those that would not be used, too.
std::vector<Layout> layouts() {
  std::vector<Layout> all = {{0, 1},
                             {0, 0, 1},
                             {0, 0, 1, 1},
                             {0, 1, 1, 0},
                             {0, 0, 0, 1, 1, 1},
                             {0, 0, 0, 0, 1, 1},
                             {0, 0, 1, 1, 2, 2},
                             {0, 0, 0, 0, 1, 1, 1, 1},
                             {0, 0, 0, 0, 0, 1, 1, 1},
                             {0, 0, 1, 1, 2, 2, 3, 3},
                             {3, 3, 3, 3, 3, 3, 3, 0}};
  std::mt19937 random(3);
  for (int i = 0; i < 12; ++i) {
    Layout& layout = all.emplace_back(2 + random() % 9);
    const unsigned nodes = 2 + random() % 3;
    for (int& number : layout) number = static_cast<int>(random() % nodes);
    layout.front() = static_cast<int>(nodes);  // two of them at least
  }
  return all;
}

constexpr Element kElements[] = {
    Element::Float32, Element::Float64,    Element::Float16,    Element::BFloat16,
    Element::Int8,    Element::Int16,      Element::Int32,      Element::Int64,
    Element::UInt8,   Element::Bool,       Element::UInt16,     Element::UInt32,
    Element::UInt64,  Element::Float8E4M3, Element::Float8E5M2, Element::Complex64};

std::vector<Reduction> reductions(int size) {
  std::vector<Reduction> all;
  for (const Element element : kElements) {
    if (element == Element::Complex64) {
      all.push_back({element, Combine::Product});
      continue;
    }
    for (const Combine combine : {Combine::Sum, Combine::Min, Combine::Max, Combine::Product})
      all.push_back({element, combine});
    all.push_back({element, Combine::Sum, size});
  }
  for (const Combine combine : {Combine::And, Combine::Or, Combine::Xor})
    all.push_back({Element::Int32, combine});
  return all;
}

// Every rank's data, of any bits but of a moderate size in floats.
std::vector<std::vector<char>> random_data(const Reduction& reduction, int ranks, int64_t count) {
  std::mt19937 random(ranks);
  std::vector<std::vector<char>> all;
  for (int r = 0; r < ranks; ++r) {
    auto& bytes = all.emplace_back(count * size_of(reduction.element));
    if (reduction.element == Element::Bool) {
      for (char& byte : bytes) byte = static_cast<char>(random() % 2);
    } else if (reduction.element == Element::Float32 || reduction.element == Element::Complex64) {
      std::normal_distribution<float> normal;
      auto* values = reinterpret_cast<float*>(bytes.data());
      for (size_t i = 0; i < bytes.size() / 4; ++i)
        values[i] = std::exp(4 * normal(random)) * normal(random);
    } else if (reduction.element == Element::Float64) {
      std::normal_distribution<double> normal;
      auto* values = reinterpret_cast<double*>(bytes.data());
      for (int64_t i = 0; i < count; ++i) values[i] = std::exp(4 * normal(random)) * normal(random);
    } else {
      for (char& byte : bytes) byte = static_cast<char>(random());
    }
  }
  return all;
}

std::vector<char*> pointers(std::vector<std::vector<char>>& data) {
  std::vector<char*> all;
  for (auto& bytes : data) all.push_back(bytes.data());
  return all;
}

std::vector<char> reduced(const Reduction& reduction, std::vector<std::vector<char>> data) {
  std::vector<const void*> sources;
  for (const auto& bytes : data) sources.push_back(bytes.data());
  std::vector<char> result(data[0].size());
  void* target = result.data();
  reduce(reduction, sources.data(), static_cast<int>(data.size()), &target, 1,
         std::ssize(result) / size_of(reduction.element));
  return result;
}

TEST(NumaNodes, EveryLayoutHasTheBitsOfOneSum) {
  for (const Layout& layout : layouts()) {
    const int size = static_cast<int>(layout.size());
    std::vector<NumaNodes> ranks;
    for (int r = 0; r < size; ++r) ranks.emplace_back(layout, r);
    for (const Reduction& reduction : reductions(size)) {
      // More than a block of the kernels, and for one dtype than one of the tree.
      const int64_t more = reduction.element == Element::Float32 ? 5000 : 1100;
      for (const int64_t count : {int64_t{1}, more}) {
        auto data = random_data(reduction, size, count);
        const std::vector<char> expected = reduced(reduction, data);
        const std::vector<char*> parts = pointers(data);
        for (const NumaNodes& nodes : ranks) nodes.sum_within(reduction, parts, count);
        for (const NumaNodes& nodes : ranks) nodes.sum_between(reduction, parts, count);
        for (const NumaNodes& nodes : ranks) nodes.copy_from_others(reduction, parts, count);
        for (const auto& bytes : data) {
          ASSERT_EQ(bytes, expected)
              << testing::PrintToString(layout) << ", element " << int(reduction.element)
              << ", combine " << int(reduction.combine) << " x " << count;
        }
      }
    }
  }
}

// What one rank takes is each rank's data once, by way of sums that others give.
TEST(NumaNodes, SumsThatAreGivenAreTaken) {
  const Reduction average{Element::Float32, Combine::Sum, 3};
  for (const Layout& layout : layouts()) {
    const int size = static_cast<int>(layout.size());
    std::map<int, std::vector<std::pair<int, Range>>> given;  // by rank that gives
    int64_t most = 0;
    for (int r = 0; r < size; ++r) {
      const NumaNodes nodes(layout, r);
      for (const auto& one : nodes.given_by(r)) {
        EXPECT_NE(layout[one.to], layout[r]);
        for (int64_t from = one.ranks.begin; from < one.ranks.end; ++from)
          EXPECT_EQ(layout[from], layout[r]);
        given[r].push_back({one.to, one.ranks});
      }
      most = std::max(most, std::ssize(given[r]));
    }
    const int64_t count = 3000;
    auto data = random_data(average, size, count);
    const std::vector<char> expected = reduced(average, data);
    for (int r = 0; r < size; ++r) {
      const NumaNodes nodes(layout, r);
      EXPECT_EQ(nodes.most_given(), most);
      std::vector<std::vector<char>> sums;
      for (const auto& one : nodes.taken()) {
        if (one.index < 0) {
          EXPECT_EQ(one.ranks, (Range{one.from, one.from + 1}));
          EXPECT_EQ(layout[one.from], layout[r]);
        } else {
          EXPECT_EQ(given[one.from].at(one.index), std::pair(r, one.ranks));
        }
        sums.push_back(reduced({Element::Float32},
                               {data.begin() + one.ranks.begin, data.begin() + one.ranks.end}));
      }
      std::vector<char> result(expected.size());
      const std::vector<char*> parts = pointers(sums);
      nodes.tree_of_taken().sum(average, reinterpret_cast<const void* const*>(parts.data()),
                                {result.data()}, count);
      ASSERT_EQ(result, expected) << testing::PrintToString(layout) << ", rank " << r;
    }
  }
}

}  // namespace
}  // namespace lockstep::comm
