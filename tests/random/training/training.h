// A random program at work: on a rank, or in one process that computes for all ranks.
#pragma once

#include <torch/optim/optimizer.h>

#include <functional>
#include <limits>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <unordered_map>
#include <vector>

#include "lockstep/parallel/ddp.h"
#include "lockstep/parallel/fsdp.h"
#include "lockstep/parallel/weight_average.h"
#include "lockstep/parallel/zero_optimizer.h"
#include "random/training/net.h"

namespace lockstep::test::training {

using parallel::DdpOptions;
using torch::optim::Optimizer;

class Feature;

struct Model {
  std::shared_ptr<Net> net;
  Group group;
  // On ranks one of these.
  std::unique_ptr<parallel::Ddp> ddp;
  std::unique_ptr<parallel::Fsdp> fsdp;
  // Of the same tensors, in the net's place for what is attached and checked.
  std::optional<torch::jit::Module> script;
  std::unique_ptr<Optimizer> optimizer;
  parallel::ZeroOptimizer* zero = nullptr;  // the optimizer, if it is one
  std::unique_ptr<parallel::WeightAverage> average;
  std::shared_ptr<parallel::CommHook> hook;  // its Ddp's
  // In one process: which parameters got a gradient since the last average.
  std::unordered_map<const void*, bool> reached;
  // And what gradient it had before.
  std::unordered_map<const void*, at::Tensor> earlier;
  // And how often gradients were averaged.
  int passes = 0;

  // What has gradients and what an optimizer steps: the net's, or this rank's parts of them.
  std::vector<at::Tensor> parameters() const;
  parallel::Hold hold();
  ModuleRef module() const { return script ? ModuleRef(*script) : ModuleRef(*net); }
};

// What belongs to one rank; where a step is cut into lanes, in one process to one of those.
struct Lane {
  int rank = 0;        // on a rank, while it computes one of its lanes: that lane's number
  int steps = 0;       // for which it has batches
  bool active = true;  // has a batch in this step
  std::vector<Model> models;
  std::vector<double> losses;

  std::vector<at::Tensor> parameters() const {
    std::vector<at::Tensor> all;
    for (const auto& model : models) {
      const auto own = model.parameters();
      all.insert(all.end(), own.begin(), own.end());
    }
    return all;
  }
};

// How Ddp averages, for the process that does it by hand.
struct Rules {
  bool divides_by_active = false;
  // Within a Join, of ranks without a batch: whether their optimizers step, and whether they do
  // all that follows a backward.
  bool everybody_updates = false;
  bool everybody_rests = false;
  // From this pass of a model on gradients are averaged over so many ranks that follow each other.
  int local_from = std::numeric_limits<int>::max();
  int local_ranks = 1;
};

// What the process that does by hand what ranks do throws where all ranks are to refuse it.
struct Refused : std::runtime_error {
  using std::runtime_error::runtime_error;
};

struct Training {
  const Program& program;
  Group group;  // of one in one process
  bool alone = false;
  bool whole_batch = false;  // one lane computes with all ranks' samples
  int models = 1;
  bool is_joint = false;  // one backward of all models' losses
  int backwards = 1;      // in each round of micro-batches
  int step = 0;
  int round = 0;  // of micro-batches, down to 0, which is not under hold()
  int model = 0;  // whose backward runs
  DdpOptions options;
  // Makes the hook of a model's Ddp, on ranks.
  std::function<std::shared_ptr<parallel::CommHook>()> hook;
  // Of a rank's Fsdp, besides what `options` say.
  std::function<parallel::FsdpOptions(const Net& net)> sharding;
  Rules rules;
  // Backwards of a step in each round, of one part of the whole batch; all but the last under
  // hold().
  std::function<int(int part)> micros = [](int) { return 1; };
  std::vector<Lane> lanes;  // one on a rank
  std::vector<std::unique_ptr<Feature>> features;

  bool on_rank() const { return !alone; }
  // Lanes that have a batch in this step.
  std::vector<Lane*> active();
  // Lanes that do what follows a backward: these, or all.
  std::vector<Lane*> stepping();
};

// One thing that a program may do besides. Every function is called in the order of the program's
// features, on ranks and in the one process alike; what follows happens in this order.
class Feature {
 public:
  virtual ~Feature() = default;

  // Numbers of models, backwards, steps, micro-batches; options of Ddp.
  virtual void plan(Training&) {}
  // A net was made, before anything is attached to it.
  virtual void build(Training&, Lane&, Net&) {}
  // All features have built theirs: names are what they will be.
  virtual void built(Training&, const Net&) {}
  // All is constructed.
  virtual void begin(Training&) {}
  virtual void begin_step(Training&) {}
  // A step's gradients are to be cleared; true when this did it.
  virtual bool clear(Training&, Lane&, Model&) { return false; }
  virtual void batch(Training&, const Lane&, const Moment&, Batch&) {}
  // From each sample's loss to the number that backward() begins at.
  virtual void loss(Training&, Lane&, const at::Tensor& each, at::Tensor& loss) {
    (void)each, (void)loss;
  }
  // Runs a forward.
  virtual void around_forward(Training&, const std::function<void()>& forward) { forward(); }
  // Runs the backward of a loss; true when this did it.
  virtual bool backward(Training&, const at::Tensor&) { return false; }
  // Gradients are averages.
  virtual void after_backward(Training&) {}
  // The optimizer steps; true when this did it.
  virtual bool update(Training&, Lane&, Model&) { return false; }
  virtual void after_step(Training&) {}
  // No batch is left.
  virtual void end(Training&) {}
};

// Numbers that a test may compare, in a fixed order, each with its name.
using State = std::vector<std::pair<std::string, at::Tensor>>;

enum class Who {
  Rank,        // this one of the group; the state is its own
  AllRanks,    // one process with a replica for each; the states of all
  WholeBatch,  // one process with one model, which sees all ranks' samples at once; its state
};
// After the last step; every rank calls it.
State state_of(const Lane& lane, const Group& group);
std::vector<State> train(const Program& program, const Group& group, Who who);

// Forwards of the model's lanes, and the sum of their losses.
at::Tensor losses(Training& training, const std::vector<Lane*>& lanes, size_t model, int micro);
// Where several models share a backward: adds to `sum`, which `loss` becomes; true with the last.
bool add_to(at::Tensor& sum, at::Tensor& loss, const Training& training);
// A step's backwards on a rank that goes through several lanes.
void run_lanes(Training& training);
// What follows the backwards of a step.
void rest_of_step(Training& training);

// What an Fsdp's modules compute in, if it is another than that of their shards.
std::optional<at::ScalarType> param_dtype_of(const Program& program);

// A scripted module of the net's tensors, with their names.
torch::jit::Module script_of(Training& training, const Net& net);

std::vector<std::string> optimizer_names();
std::unique_ptr<Optimizer> make_optimizer(const Part& part,
                                          std::vector<torch::optim::OptimizerParamGroup> groups);

// A Ddp of the model, which its hook stays with.
std::unique_ptr<parallel::Ddp> ddp_of(const Training& training, const Model& model);

// What Ddp and its options do, by hand: gradients of model `model` of all active lanes become their
// average, its buffers as the options say; by itself the latter is sync_buffers().
void average(Training& training, size_t model);
void average_buffers(Training& training, size_t model);
// What an Averager does, by hand, over so many ranks that follow each other.
void average_parameters(Training& training, int ranks);
// Whether options name the parameter in `ignore`, by any of its names in `net`.
bool is_ignored(const Training& training, const Net& net, const at::Tensor& parameter);
// At the end of a Join, lanes that are out of batches take over a lane's state that was not.
void take_over(Training& training, const std::vector<int>& present);
// Notes whether a parameter, or which of all, receives gradients.
void watch(Model& model, const at::Tensor& parameter);
void watch(Model& model);

}  // namespace lockstep::test::training
