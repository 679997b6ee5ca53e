// MPI's all-reduce of float32, as benchmarks/all_reduce.cpp measures ours: from the last rank's
// start to the last rank's end, each call after a fresh fill and a barrier. Not built with the
// project: benchmarks/figures/collectives.py compiles it with each MPI's compiler.
//   all_reduce_mpi STEPS BYTES...
#include <mpi.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <vector>

namespace {

double now_us() {
  const auto now = std::chrono::steady_clock::now()
                       .time_since_epoch();  // one clock for all processes of a machine
  return std::chrono::duration<double, std::micro>(now).count();
}

// The median over `steps` calls, on rank 0.
double latency(int ranks, int steps, size_t count) {
  float* const data =
      static_cast<float*>(std::aligned_alloc(4096, (count * sizeof(float) + 4095) / 4096 * 4096));
  std::vector<double> begins(steps), ends(steps);
  for (int i = -3; i < steps; ++i) {
    std::fill_n(data, count, 1.0f);
    MPI_Barrier(MPI_COMM_WORLD);
    const double begin = now_us();
    MPI_Allreduce(MPI_IN_PLACE, data, static_cast<int>(count), MPI_FLOAT, MPI_SUM, MPI_COMM_WORLD);
    const double end = now_us();
    if (data[count - 1] != static_cast<float>(ranks)) std::abort();
    if (i < 0) continue;
    begins[i] = begin;
    ends[i] = end;
  }
  std::free(data);
  std::vector<double> last_begins(steps), last_ends(steps);
  MPI_Reduce(begins.data(), last_begins.data(), steps, MPI_DOUBLE, MPI_MAX, 0, MPI_COMM_WORLD);
  MPI_Reduce(ends.data(), last_ends.data(), steps, MPI_DOUBLE, MPI_MAX, 0, MPI_COMM_WORLD);
  for (int i = 0; i < steps; ++i) last_ends[i] -= last_begins[i];
  std::nth_element(last_ends.begin(), last_ends.begin() + steps / 2, last_ends.end());
  return last_ends[steps / 2];
}

}  // namespace

int main(int argc, char** argv) {
  MPI_Init(&argc, &argv);
  int rank = 0, ranks = 1;
  MPI_Comm_rank(MPI_COMM_WORLD, &rank);
  MPI_Comm_size(MPI_COMM_WORLD, &ranks);
  const int steps = std::atoi(argv[1]);
  for (int i = 2; i < argc; ++i) {
    const long bytes = std::atol(argv[i]);
    const double us = latency(ranks, bytes > 1 << 20 ? std::max(1, steps / 8) : steps,
                              static_cast<size_t>(bytes) / sizeof(float));
    if (rank == 0)
      std::printf("%s\"%ld\": %.3f%s", i == 2 ? "{" : ", ", bytes, us, i + 1 == argc ? "}\n" : "");
  }
  MPI_Finalize();
}
