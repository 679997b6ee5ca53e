// Sections `optimizer`, `schedule` and `training`.
#include "train/config/key.h"

#define AT LOCKSTEP_MEMBER

namespace lockstep::train {
namespace {

void add_optimizer_keys(KeyList& keys) {
  keys.section("optimizer");
  keys.choice("kind", AT(optimizer.kind), {"sgd", "adam", "adamw"}, "The optimizer.");
  keys.add("learning_rate", AT(optimizer.learning_rate), "Before lr_scaling and the schedule.",
           at_least(0));
  keys.choice(
      "lr_scaling", AT(optimizer.lr_scaling), {"none", "linear", "sqrt"},
      "How the rate grows with the number N of ranks, or of lanes: not, x N, or x sqrt(N).");
  keys.kinds({"sgd", "adam", "adamw"});
  keys.add("weight_decay", AT(optimizer.weight_decay), "As libtorch's.", at_least(0));
  keys.choice("weight_decay_of", AT(optimizer.weight_decay_of), {"all", "matrices"},
              "The parameters that decay: all, or those with two or more dimensions, which leaves "
              "out biases and the weights of normalisations.");
  keys.kinds({"sgd"});
  keys.add("momentum", AT(optimizer.momentum), "As libtorch's.", between(0, 1));
  keys.add("nesterov", AT(optimizer.nesterov), "Nesterov's momentum.");
  keys.kinds({"adam", "adamw"});
  keys.add("beta1", AT(optimizer.beta1), "Of the mean of gradients.", between(0, 1));
  keys.add("beta2", AT(optimizer.beta2), "Of the mean of their squares.", between(0, 1));
  keys.add("eps", AT(optimizer.eps), "Added to the denominator.", at_least(0));
}

void add_schedule_keys(KeyList& keys) {
  keys.section("schedule");
  keys.choice("kind", AT(schedule.kind),
              {"constant", "linear", "cosine", "polynomial", "step", "multi_step", "exponential",
               "one_cycle", "plateau"},
              "How the learning rate develops, in optimizer steps. PyTorch's schedules.");
  keys.add("warmup_steps", AT(schedule.warmup_steps),
           "Steps in which the rate rises from 0 to the schedule's first one, before it begins.",
           at_least(0));
  keys.add("warmup_ratio", AT(schedule.warmup_ratio), "The same as a share of all steps.",
           between(0, 1));
  keys.kinds({"linear", "cosine", "polynomial", "plateau"});
  keys.add("min_lr", AT(schedule.min_lr), "The lowest rate.", at_least(0));
  keys.kinds({"step"});
  keys.add("step_size", AT(schedule.step_size),
           "Steps between two multiplications, counted from the end of warm-up.", at_least(1))
      .required = true;
  keys.kinds({"multi_step"});
  keys.add("milestones", AT(schedule.milestones),
           "The steps at which the rate is multiplied, counted from the end of warm-up.",
           at_least(1))
      .required = true;
  keys.kinds({"step", "multi_step", "exponential", "plateau"});
  keys.add("gamma", AT(schedule.gamma), "The factor of each multiplication.", between(0, 1));
  keys.kinds({"polynomial"});
  keys.add("power", AT(schedule.power), "Of the share of steps that is left.", above(0));
  keys.kinds({"one_cycle"});
  keys.add("rising", AT(schedule.rising), "Share of the steps on the way up, below 1.",
           between(0, 1));
  keys.add(
      "cycle_momentum", AT(schedule.cycle_momentum),
      "As PyTorch's: sgd's momentum, and the others' beta1, falls from 0.95 to 0.85 as the rate "
      "rises, and rises again, whatever optimizer.momentum (also 0) and optimizer.beta1 are; "
      "false: these stay.");
  keys.kinds({"plateau"});
  keys.add("patience", AT(schedule.patience), "Evaluations without a lower loss that are let pass.",
           at_least(0));
}

}  // namespace

void add_training_keys(KeyList& keys) {
  add_optimizer_keys(keys);
  add_schedule_keys(keys);
  keys.section("training");
  keys.add("epochs", AT(training.epochs), "Times through the data; not used with max_steps.",
           at_least(1));
  keys.add(
      "max_steps", AT(training.max_steps),
      "Optimizer steps after which training ends, also in the middle of an epoch or after several; "
      "0: as many as the epochs have.",
      at_least(0));
  keys.add("max_seconds", AT(training.max_seconds),
           "Wall-clock time after which the run saves and ends; 0: no limit.", at_least(0));
  keys.add("batch_size", AT(training.batch_size),
           "Samples per rank and micro-batch; with lanes: per lane.", at_least(1));
  keys.add("gradient_accumulation_steps", AT(training.gradient_accumulation_steps),
           "Micro-batches of an optimizer step.", at_least(1));
  keys.add("max_grad_norm", AT(training.max_grad_norm),
           "Gradients are clipped to this norm over all parameters; 0: not clipped.", at_least(0));
  keys.choice("non_finite", AT(training.non_finite), {"error", "skip"},
              "When the loss of any rank or the norm of the gradients is not finite: end with an "
              "error, or make no update in that step.");
  keys.add("seed", AT(training.seed), "Of the weights, the order of the data, dropout.",
           at_least(0));
  keys.choice("loss", AT(training.loss),
              {"auto", "cross_entropy", "mse", "l1", "huber", "bce_with_logits", "nll"},
              "auto: cross_entropy for classes, otherwise mse.");
  keys.add("label_smoothing", AT(training.label_smoothing), "Of cross_entropy.", between(0, 1));
  keys.choice(
      "metrics", AT(training.metrics),
      {"accuracy", "top_k", "confusion_matrix", "auc", "perplexity", "mse", "rmse", "mae", "r2"},
      "What evaluation computes beside the loss, exact over ranks.");
  keys.add("top_k", AT(training.top_k), "k of the metric top_k.", at_least(1));
  keys.choice("activation_checkpointing", AT(training.activation_checkpointing),
              {"none", "selective", "full"},
              "What a transformer computes again in backward instead of keeping it: norms and "
              "activation functions, or whole blocks.");
  keys.choice("eval_strategy", AT(training.eval_strategy), {"no", "steps", "epoch"},
              "When to evaluate.");
  keys.add("eval_steps", AT(training.eval_steps),
           "Optimizer steps between two evaluations, with eval_strategy steps.", at_least(0));
  keys.add("eval_batch_size", AT(training.eval_batch_size),
           "Samples per rank and batch of an evaluation; 0: batch_size.", at_least(0));
  keys.add("early_stopping.metric", AT(training.early_stopping.metric),
           "Training ends when this metric of the evaluation no longer improves: loss, or one that "
           "`metrics` give (also precision, recall, f1, top_5_accuracy); empty: off.");
  keys.choice(
      "early_stopping.mode", AT(training.early_stopping.mode), {"auto", "min", "max"},
      "Which is better; auto: the lower perplexity, cross_entropy, mse, rmse, mae and what ends "
      "with loss or error, otherwise the higher.");
  keys.add("early_stopping.patience", AT(training.early_stopping.patience),
           "Evaluations without improvement that are let pass.", at_least(0));
  keys.add("early_stopping.min_delta", AT(training.early_stopping.min_delta),
           "By which it has to be better to count.", at_least(0));
  keys.add("sample.prompt", AT(training.sample.prompt),
           "A transformer continues this text after each evaluation, and prints it; empty: not.");
  keys.add("sample.max_new_tokens", AT(training.sample.max_new_tokens), "Of the text.",
           at_least(1));
  keys.add("sample.temperature", AT(training.sample.temperature),
           "By which logits are divided; 0: the most likely tokens.", at_least(0));
  keys.add("sample.top_k", AT(training.sample.top_k), "Only the most likely k tokens; 0: all.",
           at_least(0));
  keys.add("sample.top_p", AT(training.sample.top_p),
           "Only the most likely tokens with so much probability together; 1: all.",
           {.least = 0, .most = 1, .above_least = true});
  keys.section("weight_average");
  keys.choice("kind", AT(weight_average.kind), {"none", "ema", "swa"},
              "Weights are averaged over the steps: an exponential moving average, or the mean of "
              "all. Evaluations, early stopping, the best checkpoint and samples are of the "
              "averages, and so is the language model that is written at the end.");
  keys.kinds({"ema"});
  keys.add("decay", AT(weight_average.decay),
           "Of the average that stays in each step; the weights have the rest.", between(0, 1));
  keys.kinds({"ema", "swa"});
  keys.add("start_step", AT(weight_average.start_step),
           "The average begins after so many optimizer steps.", at_least(0));
  keys.add("every_steps", AT(weight_average.every_steps),
           "Optimizer steps between two that take part in the average.", at_least(1));
}

}  // namespace lockstep::train

#undef AT
