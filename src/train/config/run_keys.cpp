// Sections `checkpoint`, `logging` and `launch`.
#include "train/config/key.h"

#define AT LOCKSTEP_MEMBER

namespace lockstep::train {

void add_run_keys(KeyList& keys) {
  keys.section("checkpoint");
  keys.add("directory", AT(checkpoint.directory),
           "Where checkpoints are; empty: `checkpoints` in logging.output_dir, if that is set, "
           "otherwise nothing is saved.");
  keys.choice("save_strategy", AT(checkpoint.save_strategy), {"no", "steps", "epoch"},
              "When to save; steps, where only `save_steps` is given.");
  keys.add("save_steps", AT(checkpoint.save_steps), "Optimizer steps between two checkpoints.",
           at_least(1));
  keys.add("save_total_limit", AT(checkpoint.save_total_limit),
           "How many of the newest are kept; 0: all.", at_least(0));
  keys.add(
      "resume", AT(checkpoint.resume),
      "Resume from `latest` (from the beginning when there is none) or from a checkpoint's "
      "folder; empty: start a new run. Ranks that the launcher starts again resume in any case.");
  keys.add("async", AT(checkpoint.async), "Files are written while training continues.");
  keys.add("best_metric", AT(checkpoint.best_metric),
           "The checkpoint that is best by this metric of the evaluation is kept, too.");
  keys.choice(
      "best_mode", AT(checkpoint.best_mode), {"auto", "min", "max"},
      "Which is better; auto: the lower perplexity, cross_entropy, mse, rmse, mae and what ends "
      "with loss or error, otherwise the higher.");
  keys.add(
      "restore_best", AT(checkpoint.restore_best),
      "After the run the model is that of the best checkpoint: the program's, that in the folder "
      "`model` of a transformer's run, and what `lockstep export RUN` writes of any; the "
      "checkpoints stay.");
  keys.add(
      "save_on_preemption", AT(checkpoint.save_on_preemption),
      "Save, then leave, when the job is told to stop (SIGTERM or SIGUSR1; docs/resuming.md).");

  keys.section("logging");
  keys.add("logging_steps", AT(logging.logging_steps),
           "Optimizer steps between two lines; 0: none between epochs.", at_least(0));
  keys.add("output_dir", AT(logging.output_dir), "The run's folder; empty: no files.");
  keys.add("metrics_file", AT(logging.metrics_file),
           "FOLDER/metrics.jsonl; empty: that of output_dir, if that is set.");
  keys.add("result_file", AT(logging.result_file),
           "The final metrics as JSON; empty: result.json in output_dir, if that is set.");
  keys.add("tensorboard", AT(logging.tensorboard),
           "Event files for TensorBoard, in the folder `tensorboard` beside metrics.jsonl.");
  keys.add("open_metrics_file", AT(logging.open_metrics_file),
           "The last report in OpenMetrics, for Prometheus's node_exporter; empty: none.");
  keys.add("prometheus_address", AT(logging.prometheus_address),
           "HOST:PORT at which rank 0 answers Prometheus; port 0: a free one; empty: nowhere.");
  keys.add("trace_steps", AT(logging.trace_steps),
           "The first and the last step that trace.json, beside metrics.jsonl, shows; empty: none.",
           at_least(1));

  keys.section("launch");
  keys.add("nproc_per_node", AT(launch.nproc_per_node),
           "Ranks on each host: a number, cpu, gpu, or auto.");
  keys.add("nnodes", AT(launch.nnodes), "Hosts: a number, or MIN:MAX.");
  keys.add("node_rank", AT(launch.node_rank), "This host's number; -1: not given.",
           between(-1, 49'999));
  keys.add("master_addr", AT(launch.master_addr), "Host of rank 0.");
  keys.add("master_port", AT(launch.master_port), "Where it listens; 0: not given.",
           between(0, 65535));
  keys.add("rdzv_endpoint", AT(launch.rdzv_endpoint), "HOST:PORT at which launchers meet.");
  keys.choice("rdzv_backend", AT(launch.rdzv_backend), {"static", "c10d"},
              "As torchrun's; empty: not given.");
  keys.add("rdzv_id", AT(launch.rdzv_id), "The job's name.");
  keys.add("max_restarts", AT(launch.max_restarts), "Restarts after a failure.",
           between(0, 1'000'000));
  keys.add("log_dir", AT(launch.log_dir), "Keep files of the job here.");
  keys.choice("bind", AT(launch.bind), {"none", "cores", "numa"},
              "Which cores each rank may use; empty: not given.");
  keys.add("threads_per_rank", AT(launch.threads_per_rank),
           "OMP_NUM_THREADS of the ranks; 0: not given.", between(0, 100'000));
}

}  // namespace lockstep::train

#undef AT
