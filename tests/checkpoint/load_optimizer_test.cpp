// The state of Python's optimizers, in files that Python wrote.
#include "lockstep/checkpoint/load_optimizer.h"

#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <cstdlib>
#include <fstream>
#include <memory>

#include "lockstep/checkpoint/checkpointer.h"
#include "lockstep/checkpoint/interchange.h"
#include "lockstep/parallel/fsdp.h"
#include "lockstep/parallel/fused_adam.h"
#include "lockstep/parallel/fused_sgd.h"
#include "lockstep/parallel/stateful.h"
#include "lockstep/parallel/zero_optimizer.h"
#include "support/folder.h"
#include "support/spawn.h"
#include "support/thrown.h"

namespace lockstep::test {
namespace {

using checkpoint::load_module;
using checkpoint::load_optimizer;
using checkpoint::LoadOptimizerOptions;
using checkpoint::read_tensors;
using testing::AllOf;
using testing::HasSubstr;
using torch::optim::AdamOptions;
using torch::optim::AdamWOptions;
using torch::optim::Optimizer;
using torch::optim::OptimizerParamGroup;
using torch::optim::SGDOptions;

// Writes FOLDER/NAME.pt for each optimizer: a model and the optimizer after three steps, and in
// "after" the model two steps later.
constexpr const char* kPython = R"(
import copy, sys, torch
from torch import optim

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = torch.nn.Linear(3, 4), torch.nn.Linear(4, 2)
        self.spare = torch.nn.Parameter(torch.ones(5))
    def forward(self, x):
        return self.second(torch.tanh(self.first(x)))

def step(net, optimizer):
    optimizer.zero_grad()
    x = torch.arange(12.).view(4, 3) / 6 - 1
    (net(x) - 1).square().mean().backward()
    optimizer.step()

def groups(net):
    return [{'params': [net.first.weight, net.first.bias]},
            {'params': [net.second.weight, net.second.bias, net.spare], 'lr': 0.02, 'weight_decay': 0.2}]

def write(name, make, spoil=lambda state: None):
    torch.manual_seed(1)
    net = Net()
    optimizer = make(net)
    for _ in range(3): step(net, optimizer)
    saved = {'model': {n: p.clone() for n, p in net.state_dict().items()}}
    state = copy.deepcopy(optimizer.state_dict())
    spoil(state)
    saved['optimizer'] = state
    for _ in range(2): step(net, optimizer)
    saved['after'] = net.state_dict()
    torch.save(saved, f'{sys.argv[1]}/{name}.pt')

write('adam', lambda n: optim.Adam(groups(n), lr=0.05, betas=(0.8, 0.99), eps=1e-6, amsgrad=True))
write('adamw', lambda n: optim.AdamW(groups(n), lr=0.05))
write('fused', lambda n: optim.AdamW(groups(n), lr=torch.tensor(0.05), fused=True))
write('sgd', lambda n: optim.SGD(groups(n), lr=0.05, momentum=0.9, nesterov=True))
write('plain', lambda n: optim.SGD(groups(n), lr=0.05))
write('rmsprop', lambda n: optim.RMSprop(groups(n), lr=0.05, momentum=0.5, centered=True))
write('adagrad', lambda n: optim.Adagrad(groups(n), lr=0.05, lr_decay=0.1, initial_accumulator_value=0.3))
write('named', lambda n: optim.Adam(n.named_parameters(), lr=0.05))
write('maximize', lambda n: optim.Adam(n.parameters(), lr=0.05, maximize=True))
write('other', lambda n: optim.Adadelta(n.parameters()))
def schedule(net):
    adam = optim.Adam(net.parameters(), lr=0.05)
    optim.lr_scheduler.OneCycleLR(adam, 0.05, total_steps=100)
    adam.param_groups[0]['lr_scale'] = 0.5
    return adam
write('schedule', schedule)
def forget(state):
    for s in state['state'].values(): s.pop('max_exp_avg_sq', None)
write('forgets', lambda n: optim.Adam(n.parameters(), lr=0.05, amsgrad=True), forget)
def count(state):
    state['state'][1]['step'], state['state'][2]['step'] = 3, torch.tensor(2.5)
write('counts', lambda n: optim.Adam(n.parameters(), lr=0.05), count)
def stray(state): state['state'][17] = {'step': 1}
write('stray', lambda n: optim.Adam(n.parameters(), lr=0.05), stray)
write('forgotten', lambda n: optim.Adagrad(n.parameters()), lambda state: state['state'].clear())
)";

struct Net : torch::nn::Module {
  Net() {
    first = register_module("first", torch::nn::Linear(3, 4));
    second = register_module("second", torch::nn::Linear(4, 2));
    spare = register_parameter("spare", torch::zeros({5}));
  }
  void step(Optimizer& optimizer) {
    optimizer.zero_grad();
    const at::Tensor x = torch::arange(12.F).view({4, 3}) / 6 - 1;
    (second(torch::tanh(first(x))) - 1).square().mean().backward();
    optimizer.step();
  }
  // Python's parameters() has the module's own first.
  std::vector<at::Tensor> ordered() const {
    return {spare, first->weight, first->bias, second->weight, second->bias};
  }
  std::vector<OptimizerParamGroup> groups() const {
    return {OptimizerParamGroup({first->weight, first->bias}),
            OptimizerParamGroup({second->weight, second->bias, spare})};
  }

  torch::nn::Linear first{nullptr}, second{nullptr};
  at::Tensor spare;
};

// Where Python's files are.
struct Files {
  std::string path(const std::string& name) const { return folder / (name + ".pt"); }

  // That the model goes on as Python's did.
  void expect_goes_on(Net& net, Optimizer& optimizer, const std::string& name) const {
    SCOPED_TRACE(name);
    net.step(optimizer);  // what it has before must not count
    load_module(net, path(name), {.prefix = "model."});
    load_optimizer(optimizer, path(name), {.prefix = "optimizer.", .allow_unexpected = {"lr_*"}});
    net.step(optimizer);
    net.step(optimizer);
    expect_after(net, name);
  }

  void expect_after(const Net& net, const std::string& name) const {
    for (const auto& [parameter, value] : read_tensors(path(name), "after.")) {
      const at::Tensor own = net.named_parameters()[parameter];
      EXPECT_LE((own - value).abs().max().item<double>(), 1e-6) << parameter;
    }
  }

  template <class Kind, class Options>
  void expect_kind(const std::string& name) const {
    Net net;
    Kind optimizer(net.groups(), Options(7).weight_decay(3));
    expect_goes_on(net, optimizer, name);
    const auto& options = static_cast<const Options&>(optimizer.param_groups()[1].options());
    EXPECT_EQ(options.lr(), 0.02);
    EXPECT_EQ(options.weight_decay(), 0.2);
  }

  std::string refused(const std::string& name, std::vector<at::Tensor> parameters,
                      const LoadOptimizerOptions& options = {.prefix = "optimizer."}) const {
    torch::optim::Adam adam(std::move(parameters), AdamOptions(7));
    const std::string told =
        message_of<CheckpointError>([&] { load_optimizer(adam, path(name), options); });
    EXPECT_TRUE(adam.state().empty());
    EXPECT_EQ(static_cast<const AdamOptions&>(adam.param_groups()[0].options()).lr(), 7);
    return told;
  }

  const Folder folder;
};

void each_class_goes_on(const Files& files) {
  files.expect_kind<torch::optim::Adam, AdamOptions>("adam");
  files.expect_kind<FusedAdam, AdamOptions>("adam");
  files.expect_kind<torch::optim::AdamW, AdamWOptions>("adamw");
  files.expect_kind<FusedAdamW, AdamWOptions>("fused");
  files.expect_kind<torch::optim::SGD, SGDOptions>("sgd");
  files.expect_kind<FusedSGD, SGDOptions>("sgd");
  files.expect_kind<torch::optim::SGD, SGDOptions>("plain");
  files.expect_kind<torch::optim::RMSprop, torch::optim::RMSpropOptions>("rmsprop");
  files.expect_kind<torch::optim::Adagrad, torch::optim::AdagradOptions>("adagrad");
}

void names_and_what_schedules_keep_are_left_out(const Files& files) {
  for (const char* name : {"named", "schedule"}) {
    Net net;
    torch::optim::Adam adam(net.ordered(), AdamOptions(7));
    files.expect_goes_on(net, adam, name);
    EXPECT_EQ(adam.state().count(net.spare.unsafeGetTensorImpl()), 0u);
  }
  EXPECT_THAT(files.refused("schedule", Net().ordered()), HasSubstr("group 0 has lr_scale there"));
}

// libtorch's parameters() has a tied one several times, Python's once.
void a_tied_parameter_counts_once(const Files& files) {
  const Net net;
  auto twice = net.ordered();
  twice.insert(twice.begin() + 3, net.first->weight);
  torch::optim::Adam adam(twice, AdamOptions(7));
  load_optimizer(adam, files.path("named"), {.prefix = "optimizer."});
  EXPECT_EQ(adam.state().size(), 4u);
  const auto& state = static_cast<torch::optim::AdamParamState&>(
      *adam.state().at(net.second->weight.unsafeGetTensorImpl()));
  EXPECT_EQ(state.step(), 3);
  EXPECT_TRUE(at::equal(state.exp_avg(),
                        read_tensors(files.path("named")).at("optimizer.state.3.exp_avg")));
}

void what_does_not_fit_is_listed(const Files& files) {
  const Net net;
  const auto own = net.ordered();
  const auto refused = [&](const std::string& name, const std::vector<at::Tensor>& parameters) {
    return files.refused(name, parameters);
  };
  EXPECT_THAT(files.refused("named", own, {}), HasSubstr("has no 'param_groups', so there is no"));
  EXPECT_THAT(refused("adam", own), HasSubstr("it has 2 groups there, 1 here"));
  EXPECT_THAT(refused("named", {own[0]}), HasSubstr("group 0 has 5 parameters there, 1 here"));
  EXPECT_THAT(refused("maximize", own), HasSubstr("group 0 has maximize there, which"));
  EXPECT_THAT(refused("other", own),
              AllOf(HasSubstr("group 0 has no betas.0 there that is a number"),
                    HasSubstr("group 0 has no amsgrad there that is a bool"),
                    HasSubstr("group 0 has rho there, which this optimizer does not have")));
  EXPECT_THAT(refused("forgets", own),
              HasSubstr("parameter 1 of group 0 has no max_exp_avg_sq there"));
  EXPECT_THAT(refused("counts", own), HasSubstr("parameter 2 of group 0 has no whole step there"));
  EXPECT_THAT(refused("stray", own), HasSubstr("the state of parameter 17 is of no group"));
  auto others = own;
  others[1] = torch::zeros({3, 4});
  others[2] = torch::zeros({4}, at::kDouble);
  EXPECT_THAT(
      refused("named", others),
      AllOf(HasSubstr("exp_avg of parameter 1 of group 0 is F32 [4, 3] there, F32 [3, 4] here"),
            HasSubstr("exp_avg_sq of parameter 2 of group 0 is F32 [4] there, F64 [4] here")));

  torch::optim::AdamW adamw(own);
  EXPECT_THAT(message_of<CheckpointError>(
                  [&] { load_optimizer(adamw, files.path("named"), {.prefix = "optimizer."}); }),
              HasSubstr("group 0 is of Adam there"));
  torch::optim::Adagrad adagrad(own);
  EXPECT_THAT(message_of<CheckpointError>([&] {
                load_optimizer(adagrad, files.path("forgotten"), {.prefix = "optimizer."});
              }),
              HasSubstr("parameter 0 of group 0 has no state there"));
}

// Those that are divided refuse it, and get the state by way of a checkpoint.
void divided_ones_are_told_the_way(const Files& files, const World& world) {
  const auto told = [&](Optimizer& optimizer) {
    return message_of<ConfigError>([&] { load_optimizer(optimizer, files.path("adamw")); });
  };
  const auto options = AdamWOptions(7);
  Net net;
  load_module(net, files.path("adamw"), {.prefix = "model."});
  {
    FusedAdamW whole(net.groups(), options);
    load_optimizer(whole, files.path("adamw"), {.prefix = "optimizer."});
    Checkpointer saver(world, files.folder / "checkpoints");
    saver.track("net", net);
    saver.track("optimizer", whole);
    saver.save(1);
  }
  {
    ZeroOptimizer zero(net.groups(), world.group(), parallel::zero<FusedAdamW>(options));
    EXPECT_THAT(told(zero), AllOf(HasSubstr("ZeroOptimizer is not known here"),
                                  HasSubstr("save a checkpoint with a Checkpointer")));
    Checkpointer loader(world, files.folder / "checkpoints");
    loader.track("net", net);
    loader.track("optimizer", zero);
    loader.restore_latest();
    net.step(zero);
    net.step(zero);
    files.expect_after(net, "adamw");
  }
  const auto divided = std::make_shared<Net>();
  load_module(divided, files.path("adamw"), {.prefix = "model."});
  const Fsdp fsdp(divided, world.group());
  FusedAdamW parts(fsdp.parameters(), options);
  EXPECT_THAT(told(parts), HasSubstr("the optimizer has parts of parameters"));
  torch::optim::LBFGS other(Net().ordered());
  EXPECT_THAT(told(other), HasSubstr("LBFGS is not known here"));
}

// One case, since Python takes longer to start than all of it.
TEST(LoadOptimizer, ReadsWhatPythonWrote) {
  const Files files;
  std::ofstream(files.folder / "x.py") << kPython;
  const std::string command =
      fmt::format("{0} {1}/x.py {1} 2>{1}/errors || (cat {1}/errors; false)", LOCKSTEP_PEERS_PYTHON,
                  files.folder.path());
  ASSERT_EQ(std::system(command.c_str()), 0);
  isolated([&] {
    each_class_goes_on(files);
    names_and_what_schedules_keep_are_left_out(files);
    a_tied_parameter_counts_once(files);
    what_does_not_fit_is_listed(files);
  });
  spawn(2, [&](World& world) { divided_ones_are_told_the_way(files, world); });
}

}  // namespace
}  // namespace lockstep::test
