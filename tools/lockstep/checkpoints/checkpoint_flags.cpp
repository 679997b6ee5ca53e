#include "checkpoints/checkpoint_flags.h"

#include <algorithm>
#include <array>

#include "flags.h"

namespace lockstep::tool {
namespace {

constexpr const char* kInspectFooter =
    R"(CHECKPOINT is a checkpoint's folder, a directory of checkpoints (the newest counts), the folder of a run with its
checkpoints in it, a .safetensors file, a folder with model.safetensors.index.json, or a file of Python's or C++'s
torch.save. docs/checkpoints.md.
A trajectories.jsonl of three_domain is taken, too: its episodes are counted, or one is printed.

  lockstep inspect runs/a
  lockstep inspect trajectories.jsonl --episode 3
)";
constexpr const char* kVerifyFooter =
    R"(Of a directory all checkpoints are verified, and the file `latest`. Each finding names the file, and the tensor
where it is one's.

Exit status: 0 when everything is whole; 1 when anything is damaged; 2 for wrong arguments.
)";
constexpr const char* kMergeFooter =
    R"(Tensors that ranks wrote in parts become whole. Names stay as they are: net/fc.weight.

  lockstep merge runs/a --to all.safetensors
)";
constexpr const char* kExportFooter =
    R"(--to FILE.safetensors is one file; any other --to is a folder as Hugging Face's libraries read it: model.safetensors,
or shards and model.safetensors.index.json when it would be larger than a shard may be.
Of the folder of a run with checkpoint.restore_best the best checkpoint is taken, which the last line says.

  lockstep export runs/a --only model --to net.safetensors
  lockstep export runs/a --only model --to model/ --max-shard-size 500MB
  lockstep export runs/a --only model --dtype bf16 --rename layers=model.layers --to model/
  lockstep export model.pt --to model.safetensors
)";
constexpr const char* kDiffFooter =
    R"(Numbers are compared, NaN is the same as NaN; tensors whose numbers are equal but not their bits (-0 and 0) are named, too,
unless a tolerance is given. With --only model a side that has nothing below model is taken whole.

Exit status: 0 when both are the same; 1 when they differ; 2 for anything that cannot be read.

  lockstep diff runs/a/step-00001000 runs/a/step-00002000
  lockstep diff runs/a net.safetensors --only model
)";

constexpr std::array kCommands = {"inspect", "verify", "merge", "export", "diff"};

}  // namespace

CheckpointFlags::CheckpointFlags(CLI::App& program) : program_(program) {
  constexpr const char* kCheckpoint = "Which; several kinds of files are taken (below)";
  auto& inspect = add("inspect", "Show what is in a checkpoint", kInspectFooter);
  inspect.add_option("CHECKPOINT", inspection_.path, kCheckpoint)->required();
  inspect
      .add_option("--episode", inspection_.episode,
                  "Of a trajectories.jsonl: print this conversation, from 1")
      ->type_name("N")
      ->check(whole_number(1, 1'000'000'000));
  inspect.add_flag("--json", inspection_.json, "Print one JSON object, for programs");
  inspect.add_option("--only", inspection_.only,
                     "Tensors below these names, or that match patterns");

  auto& verify = add("verify", "Compare a checkpoint with its checksums", kVerifyFooter);
  verify.add_option("CHECKPOINT", path_, kCheckpoint)->required();

  auto& merge =
      add("merge", "Write a checkpoint's tensors into one safetensors file", kMergeFooter);
  merge.add_option("CHECKPOINT", output_.from, kCheckpoint)->required();
  add_output(merge, "FILE", "The file to write");
  merge.add_option("--only", output_.only, "Tensors below these names, or that match patterns");

  auto& exported =
      add("export", "Write some of a checkpoint's tensors for other programs", kExportFooter);
  exported.add_option("CHECKPOINT", output_.from, kCheckpoint)->required();
  add_output(exported, "FILE|FOLDER", "What to write: NAME.safetensors, or a folder");
  exported.add_option(
      "--only", output_.only,
      "model: tensors below model, and without that in their names; or patterns\nas the "
      "shell's ('model/*.weight'), whose names stay as they are");
  exported
      .add_option("--dtype", output_.dtype,
                  "Floating-point tensors as fp32, fp16 or bf16 (each as it is)")
      ->type_name("DTYPE")
      ->check(one_of({"fp32", "fp16", "bf16"}));
  exported
      .add_option("--rename", output_.renamings,
                  "NEW for OLD where names begin with it, after --only; any number of\ntimes: "
                  "layers=model.layers, or model/= to leave it out")
      ->type_name("OLD=NEW")
      ->expected(1)
      ->take_all();
  exported
      .add_option("--max-shard-size", max_shard_size_, "How large files of a folder may be (5GB)")
      ->type_name("SIZE");

  auto& diff = add("diff", "Say how far two checkpoints are apart", kDiffFooter);
  diff.add_option("A", comparison_.a, "One checkpoint")->required();
  diff.add_option("B", comparison_.b, "The other one")->required();
  diff.add_option("--only", comparison_.only, "Tensors below these names, or that match patterns");
  const auto tolerance = [&diff](const char* name, double& value, const char* description) {
    diff.add_option(name, value, description)->type_name("X")->check(not_negative());
  };
  tolerance("--atol", comparison_.tolerance.absolute, "Numbers may be so far apart (0)");
  tolerance("--rtol", comparison_.tolerance.relative, "And this much of B's number (0)");
}

CLI::App& CheckpointFlags::add(const char* name, const char* description, const char* footer) {
  auto& command = *program_.add_subcommand(name, description);
  command.footer(footer);
  command.get_formatter()->column_width(28);
  return command;
}

void CheckpointFlags::add_output(CLI::App& command, const char* type, const char* description) {
  command.add_option("--to", output_.to, description)->type_name(type)->required();
  command.add_flag("--force", output_.force, "Replace what is there");
}

bool CheckpointFlags::is_command(const std::string& word) {
  return std::find(kCommands.begin(), kCommands.end(), word) != kCommands.end();
}

int CheckpointFlags::carry_out() {
  if (!max_shard_size_.empty()) {
    output_.max_shard_bytes = bytes_in("--max-shard-size", max_shard_size_);
  }
  if (program_.got_subcommand("inspect")) return tool::inspect(inspection_);
  if (program_.got_subcommand("verify")) return tool::verify(path_);
  if (program_.got_subcommand("merge")) return tool::merge(output_);
  if (program_.got_subcommand("export")) return tool::export_tensors(output_);
  return tool::compare(comparison_);
}

}  // namespace lockstep::tool
