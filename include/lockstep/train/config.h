// A run as one value: what a configuration file says, checked. docs/configuration.md lists every
// key with its type, default and allowed values; a member here has the name of its key. Needs no
// torch.
//
//   const RunConfig config = load_config("run.yaml", {"training.seed=3"});
//
// A program without a file writes RunConfig{.training = {.batch_size = 64}} and passes it to
// check_config().
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

#include "lockstep/core/error.h"
#include "lockstep/train/config_extensions.h"
#include "lockstep/train/model_config.h"

namespace lockstep::train {

// Section `optimizer`.
struct OptimizerConfig {
  std::string kind = "adam";  // sgd, adam, adamw, or one that the program has declared
  double learning_rate = 1e-3;
  // How the rate grows with the number of ranks: none, linear (x ranks) or sqrt (x sqrt(ranks)).
  std::string lr_scaling = "none";
  double weight_decay = 0;
  // Of all parameters, or of those with two or more dimensions: all, matrices.
  std::string weight_decay_of = "all";
  double momentum = 0;                            // sgd
  bool nesterov = false;                          // sgd
  double beta1 = 0.9, beta2 = 0.999, eps = 1e-8;  // adam, adamw
};

// Section `schedule`: a factor on the learning rate, step by step (optimizer steps).
struct ScheduleConfig {
  // constant, linear, cosine, polynomial, step, multi_step, exponential, one_cycle, plateau
  std::string kind = "constant";
  int64_t warmup_steps = 0;  // from 0 up to the rate, linearly; before `kind` begins
  double warmup_ratio = 0;   // the same as a share of all steps; not with warmup_steps
  double min_lr = 0;         // cosine, linear, polynomial end there; plateau stops there
  int64_t step_size = 0;     // step: steps between two multiplications by gamma
  std::vector<int64_t> milestones = {};  // multi_step
  double gamma = 0.1;                    // step, multi_step, exponential; plateau's factor
  double power = 1;                      // polynomial
  double rising = 0.3;                   // one_cycle: share of the steps on the way up
  bool cycle_momentum = true;            // one_cycle: momentum, or beta1, falls as the rate rises
  int64_t patience = 10;  // plateau: evaluations without a better metric that are tolerated
};

// One stage of training.curriculum: training on a part of the data, or on other data, first.
struct CurriculumStage {
  int64_t epochs = 1;
  double fraction = 1;            // the first share of the samples, in the data set's order
  std::string path = {};          // other data of the same kind; data.path when empty
  std::string targets_path = {};  // with `path` of npy and idx: its targets
};

// training.early_stopping.
struct EarlyStoppingConfig {
  std::string metric = {};    // "loss", "accuracy", ...: of the evaluation; empty: off
  std::string mode = "auto";  // min, max, auto (is_better_lower())
  int64_t patience = 3;       // evaluations without improvement that are tolerated
  double min_delta = 0;       // by which a metric has to be better to count
};

// training.sample: text that a language model writes after each evaluation.
struct SampleConfig {
  std::string prompt = {};  // empty: no text is written
  int64_t max_new_tokens = 100;
  double temperature = 0.8;  // 0: the most likely tokens
  int64_t top_k = 0;         // only the most likely k tokens; 0: all
  double top_p = 0.95;       // of the most likely ones with so much probability; 1: all
};

// Section `weight_average`.
struct WeightAverageConfig {
  std::string kind = "none";  // ema, swa
  double decay = 0.999;       // ema
  int64_t start_step = 0;
  int64_t every_steps = 1;
};

// Section `training`.
struct TrainingConfig {
  int64_t epochs = 1;                       // with max_steps not used
  int64_t max_steps = 0;                    // optimizer steps; 0: as many as the epochs have
  double max_seconds = 0;                   // of wall-clock time, then saved and left; 0: no limit
  int64_t batch_size = 64;                  // per rank and micro-batch (with lanes: per lane)
  int64_t gradient_accumulation_steps = 1;  // micro-batches of an optimizer step
  std::string non_finite = "error";         // a loss or norm that is not finite: error, skip
  double max_grad_norm = 0;                 // 0: gradients are not clipped
  int64_t seed = 0;
  // cross_entropy, mse, l1, huber, bce_with_logits, nll, or one that the program has declared
  std::string loss = "auto";
  double label_smoothing = 0;  // cross_entropy
  // accuracy, top_k, confusion_matrix, auc, perplexity, ...: of the evaluation
  std::vector<std::string> metrics = {};
  int64_t top_k = 5;
  // Activations that backward computes again: none, selective (of norms and activation functions),
  // full (of whole blocks). Transformers.
  std::string activation_checkpointing = "none";
  std::string eval_strategy = "epoch";  // no, steps, epoch
  int64_t eval_steps = 0;               // with eval_strategy steps
  int64_t eval_batch_size = 0;          // 0: batch_size
  EarlyStoppingConfig early_stopping = {};
  SampleConfig sample = {};
  std::vector<CurriculumStage> curriculum = {};  // before the epochs on all data
};

// parallel.fsdp: taken from files of accelerate and native ones; used with strategy fsdp only.
struct FsdpConfig {
  // SHARD_GRAD_OP, NO_SHARD, HYBRID_SHARD, HYBRID_SHARD_ZERO2
  std::string sharding_strategy = "FULL_SHARD";
  bool reshard_after_forward = true;
  std::string auto_wrap_policy = "AUTO";  // NO_WRAP, TRANSFORMER_BASED_WRAP, SIZE_BASED_WRAP
  int64_t min_num_params = 0;
  std::vector<std::string> transformer_layer_cls_to_wrap = {};
  std::string backward_prefetch = "BACKWARD_PRE";  // BACKWARD_POST, NO_PREFETCH
  bool forward_prefetch = false;
  bool cpu_offload = false;
  std::string offload_folder = "";  // of files that shards and optimizer state lie in; "": none
  std::string state_dict_type = "SHARDED_STATE_DICT";  // FULL_STATE_DICT, LOCAL_STATE_DICT
  bool use_orig_params = true;
  bool sync_module_states = true;
  bool activation_checkpointing = false;
};

// Section `parallel`.
struct ParallelConfig {
  std::string strategy = "ddp";  // ddp, fsdp
  int64_t lanes = 0;             // docs/reproducibility.md; 0: without
  double bucket_cap_mb = 25;
  std::string unused = "zero";        // parameters that backward does not reach: zero, error
  std::string buffers = "broadcast";  // broadcast, average
  bool sync_bn = false;               // BatchNorm layers become SyncBatchNorm
  int64_t sync_bn_group_size = 0;     // over groups of this many ranks; 0: all
  bool zero = false;                  // the optimizer's state sharded over the ranks
  std::string hook = "none";          // none, fp16, bf16, power_sgd, top_k
  int64_t hook_rank = 1;              // power_sgd: of the approximation
  int64_t hook_start_step = 10;       // power_sgd: plain averages before
  double hook_fraction = 0.01;        // top_k: share of the elements that is sent
  std::string backend = "auto";       // auto, shm, tcp, gloo, host-then-net, nccl, cuda_ipc
  std::string device = "auto";        // auto, cpu, cuda
  double timeout_seconds = 300;       // how long a rank waits for the others
  bool tls = false;                   // what ranks send each other over the network is encrypted
  FsdpConfig fsdp = {};
};

// Section `mixed_precision`.
struct MixedPrecisionConfig {
  std::string dtype = "no";      // no, bf16, fp16, auto (bf16 where the hardware has it)
  double initial_scale = 65536;  // fp16: the loss's
  int64_t growth_interval = 2000;
};

// Section `checkpoint`.
struct CheckpointConfig {
  std::string directory = {};           // empty: nothing is saved
  std::string save_strategy = "epoch";  // no, steps, epoch
  int64_t save_steps = 500;
  int64_t save_total_limit = 0;    // newest ones that are kept; 0: all
  std::string resume = {};         // empty, "latest", or a checkpoint's folder
  bool async = true;               // written while training continues
  std::string best_metric = {};    // the best by this metric of the evaluation is kept, too
  std::string best_mode = "auto";  // min, max, auto
  bool restore_best = false;       // after the run the model is that of the best checkpoint
  bool save_on_preemption = true;  // a signal to stop saves, then leaves
};

// Section `logging`.
struct LoggingConfig {
  int64_t logging_steps = 50;     // optimizer steps between two lines; 0: only at the ends
  std::string metrics_file = {};  // JSON lines; empty: metrics.jsonl in output_dir, if that is set
  std::string result_file = {};   // JSON; empty: result.json in output_dir, if that is set
  std::string output_dir = {};    // of the run; checkpoint.directory's default is below it
  bool tensorboard = false;       // event files, in the folder `tensorboard` beside metrics.jsonl
  std::string open_metrics_file = {};     // for node_exporter; empty: none
  std::string prometheus_address = {};    // HOST:PORT of rank 0's endpoint; empty: none
  std::vector<int64_t> trace_steps = {};  // the first and the last step of trace.json; empty: none
};

// Section `launch`: how `lockstep train` starts ranks. Flags of the command line override it.
struct LaunchConfig {
  std::string nproc_per_node = "1";  // a number, cpu, gpu or auto
  std::string nnodes = "1";          // a number, or MIN:MAX
  int64_t node_rank = -1;            // -1: not given
  std::string master_addr = {};
  int64_t master_port = 0;  // 0: not given
  std::string rdzv_endpoint = {};
  std::string rdzv_backend = {};
  std::string rdzv_id = {};
  int64_t max_restarts = 0;
  std::string log_dir = {};
  std::string bind = {};         // none, cores, numa; empty: not given
  int64_t threads_per_rank = 0;  // OMP_NUM_THREADS; 0: not given
};

// A whole configuration.
struct RunConfig {
  ModelConfig model = {};
  DataConfig data = {};
  OptimizerConfig optimizer = {};
  ScheduleConfig schedule = {};
  TrainingConfig training = {};
  WeightAverageConfig weight_average = {};
  ParallelConfig parallel = {};
  MixedPrecisionConfig mixed_precision = {};
  CheckpointConfig checkpoint = {};
  LoggingConfig logging = {};
  LaunchConfig launch = {};
  // Values of keys that the program has declared: "model.heads", "my_section.key". Each declared
  // key has one.
  std::map<std::string, Value> extra = {};

  // Where values came from: "training.seed" -> "run.yaml:12", "--set training.seed=3", "environment
  // NAME". Keys that are not listed have their default.
  std::map<std::string, std::string> origins = {};
  // What was read in another way than a reader may expect, one line each, to be said once by rank
  // 0 on start.
  std::vector<std::string> remarks = {};
  // The file that load_config() has read it from; empty: a program has made it.
  std::string file = {};

  // The value of a declared key. Throws ConfigError when there is none of that name and type.
  template <class T>
  const T& extra_value(const std::string& key) const {
    const auto found = extra.find(key);
    const T* value = found == extra.end() ? nullptr : std::get_if<T>(&found->second);
    if (value == nullptr) {
      throw ConfigError("[config] the program asks for " + key +
                        ", which it did not declare with that type");
    }
    return *value;
  }
};

// Reads a file, then environment variables (docs/configuration.md), then `overrides`
// ("section.key=value", the right-hand side in YAML; later ones win). Throws one ConfigError that
// lists everything that is wrong: unknown and repeated keys, values of a wrong type or out of
// range, with file, line and column, the nearest known name and the allowed values. Reads only; may
// be called by any rank, and gives every rank the same where file and environment are the same.
// What the ranks of such a run would refuse, as far as the file tells, is wrong, too.
RunConfig load_config(const std::string& path, const std::vector<std::string>& overrides = {},
                      const ConfigExtensions& extensions = {});

// As load_config(), from memory, without what only ranks would refuse; `name` stands for the file
// in errors.
RunConfig parse_config(const std::string& text, const std::string& name,
                       const std::vector<std::string>& overrides = {},
                       const ConfigExtensions& extensions = {});

// Checks the values of a configuration that a program has made, as load_config() does. Throws
// ConfigError that lists everything that is wrong.
void check_config(const RunConfig& config, const ConfigExtensions& extensions = {});

// Whether a metric of the evaluation is the better the lower it is: what `auto` means in
// early_stopping.mode and best_mode. Of a program's own metrics those whose names end with "loss"
// or "error".
bool is_better_lower(std::string_view metric);
// The names of the numbers that an evaluation computes; none where a metric of the program may give
// any.
std::vector<std::string> evaluated_numbers(const TrainingConfig& config);

// Whether the schedule moves sgd's momentum, or beta1 of adam and adamw; the optimizer's own value
// is then not used.
bool moves_momentum(const RunConfig& config);

// The effective configuration as a file that load_config() reads back to the same values, with a
// comment on each line that says where the value came from.
std::string show_config(const RunConfig& config, const ConfigExtensions& extensions = {});

// A commented file to start from; load_config() takes it as it is.
std::string starter_config();

// All keys with types, defaults and allowed values, as Markdown: docs/configuration.md.
std::string config_reference();

}  // namespace lockstep::train

namespace lockstep {
using train::ConfigExtensions;
using train::load_config;
using train::RunConfig;
}  // namespace lockstep
