// Every collective on views: at offsets, with strides, with empty parts, in private and in group
// memory, alike and not alike on the ranks. What lies beside a view stays as it was.
#include <ATen/ATen.h>
#include <c10/core/InferenceMode.h>
#include <gmock/gmock.h>

#include <array>
#include <numeric>

#include "lockstep/core/error.h"
#include "support/spawn.h"
#include "support/thrown.h"

namespace lockstep::comm {
namespace {

using test::name_of;
using test::Ranks;
using test::spawn;

constexpr int64_t kRoom = 8000;

// Where a rank's elements lie.
struct Layout {
  bool in_group_memory;
  int64_t offset;
  int64_t stride;
};
constexpr Layout kLayouts[] = {{false, 0, 1}, {true, 0, 1},  {false, 3, 1}, {true, 3, 1},
                               {true, 17, 1}, {false, 2, 3}, {true, 5, 2},  {true, 1024, 1}};

// A view of one of two memories, and what all of that memory should be in the end.
class Area {
 public:
  Area(const std::array<at::Tensor, 2>& memories, const Layout& layout, int64_t count)
      : layout_(layout), count_(count), whole_(memories[layout.in_group_memory]) {
    whole_.fill_(77);
    expected_ = whole_.clone();
    view = of(whole_);
  }

  at::Tensor view;

  void set(const at::Tensor& values) {
    view.copy_(values);
    expect(values);
  }
  void expect(const at::Tensor& values) { of(expected_).copy_(values); }
  bool is_as_expected() const { return at::equal(whole_, expected_); }

 private:
  at::Tensor of(const at::Tensor& memory) const {
    return memory.as_strided({count_}, {layout_.stride}, layout_.offset);
  }

  Layout layout_;
  int64_t count_;
  at::Tensor whole_;
  at::Tensor expected_;
};

// How many elements an area of a variant has.
using Count = std::function<int64_t(int64_t variant, int rank, int size)>;

class Views : public testing::TestWithParam<Ranks> {
 protected:
  using Body = std::function<void(const Group&, int64_t variant, Area& input, Area& output)>;

  // Calls `body` for every variant in every layout: the same on all ranks, then others on each
  // rank.
  static void run(const std::vector<int64_t>& variants, const Count& inputs, const Count& outputs,
                  const Body& body) {
    spawn(GetParam(), [&](World& world) {
      const Group& group = world.group();
      const int rank = group.rank(), size = group.size();
      const std::array<at::Tensor, 2> in{at::empty({kRoom}), group.empty({kRoom})};
      const std::array<at::Tensor, 2> out{at::empty({kRoom}), group.empty({kRoom})};
      const int layouts = static_cast<int>(std::size(kLayouts));
      for (const int64_t variant : variants) {
        for (int i = 0; i < 2 * layouts; ++i) {
          const int by_rank = i % 2, first = i / 2;
          const Layout& of_input = kLayouts[(first + by_rank * rank) % layouts];
          const Layout& of_output = kLayouts[(first * 3 + by_rank * rank) % layouts];
          Area input(in, of_input, inputs(variant, rank, size)),
              output(out, of_output, outputs(variant, rank, size));
          body(group, variant, input, output);
          EXPECT_TRUE(input.is_as_expected() && output.is_as_expected())
              << "variant " << variant << ", input layout " << &of_input - kLayouts
              << ", output layout " << &of_output - kLayouts << ", "
              << (by_rank ? "others" : "the same") << " on the other ranks";
        }
      }
    });
  }
};

INSTANTIATE_TEST_SUITE_P(On, Views,
                         testing::Values(Ranks{"shm", 2}, Ranks{"shm", 3}, Ranks{"tcp", 3},
                                         Ranks{"gloo", 3}, Ranks{"auto", 4, {0, 0, 1, 1}},
                                         Ranks{"auto", 3, {0, 1, 0}},
                                         Ranks{"auto", 5, {0, 0, 0, 1, 1}}),
                         name_of);

// So many elements that some ranks' slices of them are empty, and that none is.
const std::vector<int64_t> kCounts = {1, 5, 16, 40, 400};

at::Tensor values(int64_t count, int rank) {
  return (at::arange(count, at::kLong) + 2 * rank).remainder(5).to(at::kFloat);
}

at::Tensor sum_of(int size, const std::function<at::Tensor(int rank)>& of) {
  at::Tensor sum = of(0).clone();
  for (int r = 1; r < size; ++r) sum += of(r);
  return sum;
}

at::Tensor joined(int size, const std::function<at::Tensor(int rank)>& of) {
  std::vector<at::Tensor> all;
  for (int r = 0; r < size; ++r) all.push_back(of(r));
  return at::cat(all);
}

int64_t itself(int64_t variant, int, int) { return variant; }
int64_t times_size(int64_t variant, int, int size) { return variant * size; }
int64_t nothing(int64_t, int, int) { return 0; }

// Patterns of parts: with empty ones first, last, between, nothing but them, and none of them.
const std::vector<int64_t> kPatterns = {0, 1, 2, 3, 4, 5};

std::vector<int64_t> counts_of(int64_t pattern, int size) {
  std::vector<int64_t> counts(size);
  for (int r = 0; r < size; ++r) {
    const int64_t patterns[] = {
        r == size - 1 ? 7 : 0, r == 0 ? 7 : 0, r % 2 ? 0 : 30, r * 20, 0, 11};
    counts[r] = patterns[pattern];
  }
  return counts;
}

int64_t total(const std::vector<int64_t>& counts) {
  return std::accumulate(counts.begin(), counts.end(), int64_t{0});
}

int64_t own_part(int64_t pattern, int rank, int size) { return counts_of(pattern, size)[rank]; }
int64_t all_parts(int64_t pattern, int, int size) { return total(counts_of(pattern, size)); }

TEST_P(Views, AllReduce) {
  run(kCounts, nothing, itself, [](const Group& group, int64_t count, Area&, Area& data) {
    data.set(values(count, group.rank()));
    group.all_reduce(data.view).wait();
    data.expect(sum_of(group.size(), [&](int r) { return values(count, r); }));
  });
}

TEST_P(Views, ReduceAndBroadcast) {
  run(kCounts, itself, itself, [](const Group& group, int64_t count, Area& data, Area& told) {
    const int root = group.size() - 1;
    data.set(values(count, group.rank()));
    group.reduce(data.view, root).wait();
    if (group.rank() == root)
      data.expect(sum_of(group.size(), [&](int r) { return values(count, r); }));
    told.set(values(count, group.rank()));
    group.broadcast(told.view, root).wait();
    told.expect(values(count, root));
  });
}

TEST_P(Views, ReduceScatter) {
  run(kCounts, times_size, itself,
      [](const Group& group, int64_t count, Area& input, Area& output) {
        const int size = group.size();
        input.set(values(size * count, group.rank()));
        group.reduce_scatter(output.view, input.view).wait();
        const at::Tensor sum = sum_of(size, [&](int r) { return values(size * count, r); });
        output.expect(sum.narrow(0, group.rank() * count, count));
      });
  run(kPatterns, all_parts, own_part,
      [](const Group& group, int64_t pattern, Area& input, Area& output) {
        const auto counts = counts_of(pattern, group.size());
        input.set(values(total(counts), group.rank()));
        group.reduce_scatter(output.view, input.view.split_with_sizes(counts)).wait();
        const at::Tensor sum =
            sum_of(group.size(), [&](int r) { return values(total(counts), r); });
        output.expect(sum.split_with_sizes(counts)[group.rank()]);
      });
}

TEST_P(Views, AllGather) {
  run(kCounts, itself, times_size,
      [](const Group& group, int64_t count, Area& input, Area& output) {
        input.set(values(count, group.rank()));
        group.all_gather(output.view, input.view).wait();
        output.expect(joined(group.size(), [&](int r) { return values(count, r); }));
      });
  run(kPatterns, own_part, all_parts,
      [](const Group& group, int64_t pattern, Area& input, Area& output) {
        const auto counts = counts_of(pattern, group.size());
        input.set(values(counts[group.rank()], group.rank()));
        group.all_gather(output.view.split_with_sizes(counts), input.view).wait();
        output.expect(joined(group.size(), [&](int r) { return values(counts[r], r); }));
      });
}

// There and back, doubled at the root.
TEST_P(Views, GatherAndScatter) {
  const Count at_root = [](int64_t pattern, int rank, int size) {
    return rank == size - 1 ? total(counts_of(pattern, size)) : 0;
  };
  run(kPatterns, own_part, at_root, [](const Group& group, int64_t pattern, Area& own, Area& all) {
    const int rank = group.rank(), root = group.size() - 1;
    const auto counts = counts_of(pattern, group.size());
    const auto parts = rank == root ? all.view.split_with_sizes(counts) : std::vector<at::Tensor>();
    own.set(values(counts[rank], rank));
    group.gather(parts, own.view, root).wait();
    all.view.mul_(2);
    if (rank == root)
      all.expect(2 * joined(group.size(), [&](int r) { return values(counts[r], r); }));
    group.scatter(own.view, parts, root).wait();
    own.expect(2 * values(counts[rank], rank));
  });
}

TEST_P(Views, AllToAll) {
  run(kCounts, times_size, times_size,
      [](const Group& group, int64_t count, Area& input, Area& output) {
        const int size = group.size(), rank = group.rank();
        input.set(values(size * count, rank));
        group.all_to_all(output.view, input.view).wait();
        output.expect(joined(
            size, [&](int r) { return values(size * count, r).narrow(0, rank * count, count); }));
      });
  // Rank r's part for rank s has as many elements as s's for r.
  static constexpr auto counts_by_rank = [](int64_t pattern, int rank, int size) {
    auto counts = counts_of(pattern, size);
    const int64_t own = counts[rank];
    for (int64_t& count : counts) count += own;
    return counts;
  };
  const Count all = [](int64_t pattern, int rank, int size) {
    return total(counts_by_rank(pattern, rank, size));
  };
  run(kPatterns, all, all, [](const Group& group, int64_t pattern, Area& input, Area& output) {
    const int size = group.size(), rank = group.rank();
    const auto counts = counts_by_rank(pattern, rank, size);
    input.set(values(total(counts), rank));
    group.all_to_all(output.view.split_with_sizes(counts), input.view.split_with_sizes(counts))
        .wait();
    output.expect(joined(size, [&](int r) {
      const auto theirs = counts_by_rank(pattern, r, size);
      return values(total(theirs), r).split_with_sizes(theirs)[rank];
    }));
  });
}

// A dimension of one element has any stride.
TEST_P(Views, OneColumn) {
  spawn(GetParam(), [](World& world) {
    const Group& group = world.group();
    const int64_t size = group.size(), rank = group.rank();
    const at::Tensor column = at::zeros({1, size}).t(),
                     one = at::full({1, 7}, float(rank)).t().narrow(0, 3, 1);
    ASSERT_TRUE(column.is_contiguous() && column.stride(1) == size);
    group.all_gather(column, one).wait();
    EXPECT_TRUE(at::equal(column.view({size}), at::arange(size, at::kFloat)));
    at::Tensor sum = at::zeros({1, 5}).t().narrow(0, 2, 1);
    group.reduce_scatter(sum, column).wait();
    EXPECT_EQ(sum.item<float>(), float(size * rank));
    group.all_to_all(column, column.clone()).wait();
    EXPECT_TRUE(at::equal(column.view({size}), at::full({size}, float(rank))));
  });
}

// As if the inputs had been copied first, wherever they lie in the outputs.
TEST_P(Views, InputsInOutputs) {
  spawn(GetParam(), [](World& world) {
    const Group& group = world.group();
    const int size = group.size(), rank = group.rank();
    for (const int64_t count : {3, 100000}) {
      const auto mine = [&](int r) { return values(size * count, r); };
      const auto part = [&](int r, int s) { return mine(r).narrow(0, s * count, count); };
      const at::Tensor dealt = joined(size, [&](int r) { return part(r, rank); }),
                       gathered = joined(size, [&](int r) { return part(r, 0); }),
                       summed = sum_of(size, [&](int r) { return part(r, rank); });
      at::Tensor all = mine(rank);
      group.all_to_all(all, all).wait();
      EXPECT_TRUE(at::equal(all, dealt));
      all = mine(rank);
      const auto parts = all.split(count);
      group.all_to_all(parts, parts).wait();
      EXPECT_TRUE(at::equal(all, dealt));
      for (const int64_t offset : {0, 1, 2}) {  // 0: its own part, where nothing is copied
        const int64_t at = offset == 1 ? (rank + 1) % size * count : rank * count + offset;
        at::Tensor room = at::zeros({size * count + 2});
        const at::Tensor whole = room.narrow(0, 0, size * count), one = room.narrow(0, at, count);
        one.copy_(part(rank, 0));
        group.all_gather(whole, one).wait();
        EXPECT_TRUE(at::equal(whole, gathered)) << offset;
        whole.copy_(mine(rank));
        group.reduce_scatter(one, whole).wait();
        EXPECT_TRUE(at::equal(one, summed)) << offset;
      }
      at::Tensor passed = part(rank, 0).clone();
      group.send_recv(passed, passed, {.to = (rank + 1) % size, .from = (rank + size - 1) % size})
          .wait();
      EXPECT_TRUE(at::equal(passed, part((rank + size - 1) % size, 0)));
      group.barrier().wait();
    }
  });
}

// Of parts of unequal size, at one rank, and in lists.
TEST_P(Views, InputsInOutputsOfLists) {
  spawn(GetParam(), [](World& world) {
    const Group& group = world.group();
    const int size = group.size(), rank = group.rank(), root = 1 % size;
    for (const int64_t count : {3, 100000}) {
      const auto of = [&](int r) { return values(count + r, 3 * r); };
      const at::Tensor all = joined(size, of);
      std::vector<int64_t> counts;
      for (int r = 0; r < size; ++r) counts.push_back(count + r);
      // What a rank brings lies where another's goes to, shifted by one, or where its own goes.
      for (const int64_t from : {int64_t{0}, int64_t{1}, rank * count + rank * (rank - 1) / 2}) {
        at::Tensor room = at::zeros({all.numel() + 1});
        const auto parts = room.narrow(0, 0, all.numel()).split_with_sizes(counts);
        const at::Tensor mine = room.narrow(0, from, count + rank);
        mine.copy_(of(rank));
        group.all_gather(parts, mine).wait();
        EXPECT_TRUE(at::equal(room.narrow(0, 0, all.numel()), all)) << from;
        room.zero_();
        mine.copy_(of(rank));
        group.gather(rank == root ? parts : std::vector<at::Tensor>(), mine, root).wait();
        EXPECT_TRUE(rank != root || at::equal(room.narrow(0, 0, all.numel()), all)) << from;
        room.narrow(0, 0, all.numel()).copy_(all);
        group.scatter(mine, rank == root ? parts : std::vector<at::Tensor>(), root).wait();
        EXPECT_TRUE(at::equal(mine, of(rank))) << from;
        room.narrow(0, 0, all.numel()).copy_(all);
        group.reduce_scatter(mine, parts).wait();
        EXPECT_TRUE(at::equal(mine, of(rank) * size)) << from;
      }
      // A column of a matrix into the rest of it.
      at::Tensor matrix = at::zeros({count, size + 1});
      matrix.select(1, size).copy_(values(count, rank));
      std::vector<at::Tensor> columns;
      for (int r = 0; r < size; ++r) columns.push_back(matrix.select(1, r));
      group.all_gather(columns, matrix.select(1, size)).wait();
      for (int r = 0; r < size; ++r) EXPECT_TRUE(at::equal(columns[r], values(count, r)));
      EXPECT_TRUE(at::equal(matrix.select(1, size), values(count, rank)));
    }
    group.barrier().wait();
  });
}

TEST_P(Views, OutputsThatShareMemoryAreRefused) {
  spawn(GetParam(), [](World& world) {
    const Group& group = world.group();
    const auto size = static_cast<size_t>(group.size());
    const at::Tensor whole = at::ones({7}), one = at::ones({3});
    const std::vector<at::Tensor> twice(size, one.clone()), inputs(size, one),
        shifted{whole.narrow(0, 0, 3), whole.narrow(0, 2, 3)};
    const auto expect_refused = [&](std::string_view text, const auto& call) {
      EXPECT_THAT(test::message_of<ConfigError>(call), testing::HasSubstr(std::string(text)));
    };
    const char* const kTwo = "two outputs share memory: give each its own";
    expect_refused(std::string("[comm] all_gather: ") + kTwo,
                   [&] { (void)group.all_gather(twice, one); });
    expect_refused(kTwo, [&] { (void)group.all_to_all(twice, inputs); });
    expect_refused(kTwo, [&] {
      (void)group.reduce_scatter(shifted,
                                 {at::ones({3 * group.size()}), at::ones({3 * group.size()})});
    });
    if (group.rank() == 0) expect_refused(kTwo, [&] { (void)group.gather(twice, one); });
    // Elements that share memory: a dimension without a stride, and windows.
    for (const at::Tensor& itself :
         {at::zeros({1}).expand({3}), at::zeros({5}).unfold(0, 3, 2).t().narrow(1, 0, 2)}) {
      const char* const kOwn = "an output's elements share memory";
      const at::Tensor input = at::ones({itself.numel()});
      expect_refused(kOwn, [&] { (void)group.all_reduce(itself); });
      expect_refused(kOwn, [&] { (void)group.broadcast({itself, input}); });
      expect_refused(kOwn, [&] { (void)group.all_reduce({itself, input}); });
      expect_refused(kOwn, [&] {
        (void)group.send_recv(itself, input, {.to = group.rank(), .from = group.rank()});
      });
      expect_refused(kOwn, [&] {
        const int next = static_cast<int>((group.rank() + 1) % size);
        (void)group.recv(itself, next);
      });
    }
    // What is combined in place may be there twice.
    at::Tensor sum = at::ones({4});
    group.all_reduce({sum, sum.narrow(0, 1, 2)}).wait();
    EXPECT_TRUE(at::equal(sum, at::full({4}, static_cast<float>(size))));
    // To itself, from memory that it shares, and not contiguous.
    at::Tensor line = at::arange(6, at::kFloat), square = at::zeros({3, 3});
    group
        .send_recv(line.narrow(0, 1, 5), line.narrow(0, 0, 5),
                   {.to = group.rank(), .from = group.rank()})
        .wait();
    EXPECT_TRUE(at::equal(line.narrow(0, 1, 5), at::arange(5, at::kFloat)));
    group
        .send_recv(square.t(), at::arange(9, at::kFloat),
                   {.to = group.rank(), .from = group.rank()})
        .wait();
    EXPECT_TRUE(at::equal(square.t().reshape({9}), at::arange(9, at::kFloat)));
    group.barrier().wait();
  });
}

TEST_P(Views, Messages) {
  run({0, 1, 400}, itself, itself,
      [](const Group& group, int64_t count, Area& input, Area& output) {
        const int size = group.size(), from = (group.rank() + size - 1) % size;
        input.set(values(count, group.rank()));
        Work sent = group.send(input.view, (group.rank() + 1) % size);
        group.recv(output.view, from).wait();
        sent.wait();
        output.expect(values(count, from));
      });
}

// Where libtorch itself would not write it.
TEST_P(Views, AnInferenceTensorMayBeWaitedForOutsideOfItsMode) {
  spawn(GetParam(), [](World& world) {
    const Group& group = world.group();
    Work reduced, scaled, listed;
    at::Tensor a, b, c, d;
    {
      const c10::InferenceMode inference;
      for (at::Tensor* each : {&a, &b, &c, &d}) *each = at::ones({4, 2}).t();
      reduced = group.all_reduce(a);
      scaled = group.all_reduce(b, ReduceOp::PreMulSum, {.factor = 2});
      listed = group.all_reduce(std::vector<at::Tensor>{c, d.slice(1, 0, 2)});
    }
    for (Work* work : {&reduced, &scaled, &listed}) work->wait();
    group.all_reduce(a).wait();
    group.all_reduce(b, ReduceOp::PreMulSum, {.factor = 2}).wait();
    const auto n = static_cast<float>(world.size());
    EXPECT_TRUE(at::equal(a.clone(), at::full({2, 4}, n * n)));
    EXPECT_TRUE(at::equal(b.clone(), at::full({2, 4}, 4 * n * n)));
    EXPECT_TRUE(at::equal(c.clone(), at::full({2, 4}, n)));
    EXPECT_EQ(d.clone().sum().item<float>(), 4 * n + 4);
  });
}

}  // namespace
}  // namespace lockstep::comm
