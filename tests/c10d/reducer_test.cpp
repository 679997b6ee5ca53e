// libtorch's own c10d::Reducer, which Python's DistributedDataParallel is made of, over the
// backend.
#include <torch/csrc/autograd/autograd.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/linear.h>

#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <torch/csrc/distributed/c10d/reducer.hpp>

#include "c10d/support.h"

namespace lockstep::test {
namespace {

TEST(Reducer, AveragesGradients) {
  spawn_backends(2, [](::c10d::Backend& backend, const StorePtr& store) {
    const int rank = backend.getRank();
    const auto group = c10::make_intrusive<::c10d::ProcessGroup>(store, rank, 2);
    group->setBackend(c10::DeviceType::CPU, ::c10d::ProcessGroup::BackendType::CUSTOM,
                      c10::intrusive_ptr<::c10d::Backend>::unsafe_reclaim_from_nonowning(&backend));
    group->setDefaultBackend(::c10d::ProcessGroup::BackendType::CUSTOM);
    torch::manual_seed(1);
    torch::nn::Sequential net(torch::nn::Linear(8, 30000), torch::nn::Linear(30000, 1));
    const auto parameters = net->parameters();
    std::vector<std::vector<size_t>> buckets{{3, 2}, {1, 0}};
    const auto reducer = std::make_shared<::c10d::Reducer>(
        parameters, buckets, group, std::vector<bool>(4, false), int64_t{25} << 20,
        /*find_unused_parameters=*/false, /*gradient_as_bucket_view=*/true,
        std::unordered_map<size_t, std::string>(), int64_t{1} << 20,
        /*skip_all_reduce_unused_params=*/false, /*use_python_reducer=*/false,
        std::vector<int64_t>());
    const at::Tensor inputs = at::arange(16, at::kFloat).view({2, 8}) / 16;
    for (int step = 0; step < 3; ++step) {
      const at::Tensor whole = net->forward(inputs).sum() / 2;
      const auto want = torch::autograd::grad({whole}, parameters);
      net->zero_grad();
      reducer->prepare_for_forward();
      EXPECT_EQ(reducer->rebuild_buckets(), step == 1);
      const at::Tensor loss = net->forward(inputs.narrow(0, rank, 1)).sum();
      reducer->prepare_for_backward({});
      loss.backward();
      for (size_t i = 0; i < parameters.size(); ++i)
        EXPECT_TRUE(at::allclose(parameters[i].grad(), want[i], 1e-5, 1e-6)) << i;
    }
  });
}

}  // namespace
}  // namespace lockstep::test
