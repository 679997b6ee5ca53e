// Trains a small language model on files of tokens, and lets it write:
//   lockstep tokenize /usr/share/perl/*/pod --to corpus --vocabulary 8192
//   lockstep run --nproc-per-node 2 gpt --corpus corpus --directory runs/gpt
// It resumes where it was when it is started again, with the same bits.
#include <lockstep/data/token_dataset.h>
#include <lockstep/lockstep.h>
#include <lockstep/models/generate.h>
#include <lockstep/models/pretrained.h>
#include <lockstep/text/utf8.h>
#include <torch/torch.h>

#include <algorithm>
#include <cmath>
#include <cstdio>

#include "program.h"

namespace {

namespace models = lockstep::models;

struct Options {
  std::string corpus;
  std::string directory = "runs/gpt";
  std::string prompt = "The ";
  int64_t steps = 2000;
  int64_t save_every = 500;
  int64_t batch_size = 8;  // per rank
  int64_t sequence_length = 256;
  int64_t layers = 6;
  int64_t hidden = 320;
  int64_t heads = 5;
  int64_t sample_tokens = 100;
  double learning_rate = 1e-3;
};

// exp of the mean loss over the last sequences of the corpus, which are not trained on.
double perplexity(models::Transformer& net, lockstep::Loader& held_out,
                  const lockstep::World& world) {
  const torch::NoGradGuard no_grad;
  torch::Tensor sum = torch::zeros({}, torch::kDouble);
  int64_t count = 0;
  for (const auto& [ids, targets] : held_out.epoch(0)) {
    sum += lockstep::call(net, ids, targets) * targets.numel();
    count += targets.numel();
  }
  return std::exp(lockstep::global_mean(world, sum, count));
}

void write_sample(models::Transformer& net, const lockstep::Tokenizer& tokenizer,
                  const Options& options) {
  lockstep::TextStream stream(tokenizer);
  std::printf("%s", options.prompt.c_str());
  models::generate(net, {tokenizer.encode(options.prompt)},
                   {.max_new_tokens = options.sample_tokens,
                    .temperature = 0.8,
                    .top_p = 0.95,
                    .stop = {tokenizer.id_of("<|endoftext|>").value_or(-1)},
                    .seed = 1,
                    .vocabulary = tokenizer.size(),
                    .on_token = [&](size_t, int32_t token) {
                      std::printf("%s", lockstep::text::valid_utf8(stream.add(token)).c_str());
                    }});
  std::printf("%s\n", lockstep::text::valid_utf8(stream.finish()).c_str());
}

void train(const lockstep::World& world, const Options& options) {
  const auto tokenizer = lockstep::Tokenizer::from_file(options.corpus);
  const int64_t length = options.sequence_length;
  const int64_t all =
      lockstep::data::TokenDataset(options.corpus, {.sequence_length = length}).size();
  const int64_t kept = std::max<int64_t>(1, std::min<int64_t>(all / 20, 200));
  lockstep::Loader loader(lockstep::data::TokenDataset(
                              options.corpus, {.sequence_length = length, .count = all - kept}),
                          world, {.batch_size = options.batch_size, .seed = 1, .drop_last = true});
  lockstep::Loader held_out(lockstep::data::TokenDataset(
                                options.corpus, {.sequence_length = length, .first = all - kept}),
                            world,
                            {.batch_size = options.batch_size, .shuffle = false, .exact = true});

  lockstep::seed_everything(1, world);
  models::Transformer net({.vocabulary = tokenizer.size(),
                           .layers = options.layers,
                           .hidden = options.hidden,
                           .heads = options.heads,
                           .max_length = std::max<int64_t>(length, options.sample_tokens + 64)});
  lockstep::Ddp ddp(net, world);
  lockstep::FusedAdamW adam(
      net->parameters(),
      torch::optim::AdamWOptions(options.learning_rate).betas({0.9, 0.95}).weight_decay(0.1));
  lockstep::LrScheduler schedule(
      adam, lockstep::cosine_lr({.steps = options.steps, .lowest_lr = options.learning_rate / 10}));

  lockstep::Checkpointer checkpoints(world, options.directory, {.retention = {.keep_last = 2}});
  checkpoints.track("net", net);
  checkpoints.track("adam", adam);
  checkpoints.track("schedule", schedule);
  checkpoints.track("loader", loader);
  checkpoints.track_generators();
  const auto found = checkpoints.restore_latest();
  int64_t step = found ? found->step : 0;
  if (world.is_main()) {
    std::printf("%s at step %ld: %.2f M parameters, %ld sequences of %ld tokens\n",
                found ? "resumes" : "starts", step,
                static_cast<double>(models::parameter_count(net->options)) / 1e6, all - kept,
                length);
  }

  for (int64_t epoch = loader.state().epoch; step < options.steps; ++epoch) {
    for (const auto& [ids, targets] : loader.epoch(epoch)) {
      ddp.zero_grad();
      const torch::Tensor loss = lockstep::call(net, ids, targets);
      loss.backward();
      lockstep::clip_grad_norm_(net->parameters(), 1.0);
      adam.step();
      schedule.step();
      const bool ends = ++step == options.steps;
      if (ends || step % options.save_every == 0) {
        const double mean = lockstep::sum_over_ranks(loss.item<double>(), world) / world.size();
        const double held = perplexity(net, held_out, world);
        if (world.is_main())
          std::printf("step %ld: loss %.4f, perplexity %.6f\n", step, mean, held);
        checkpoints.save(step, {{"loss", mean}, {"perplexity", held}});
      }
      if (ends) break;
    }
  }
  checkpoints.finish();
  if (!world.is_main()) return;
  write_sample(net, tokenizer, options);
  models::SaveTransformerOptions how;
  if (const auto end = tokenizer.id_of("<|endoftext|>")) how.stop = {*end};
  models::save_transformer(net, options.directory + "/model", how);
  tokenizer.save(options.directory + "/model/tokenizer.json");
}

}  // namespace

int main(int argc, char** argv) {
  CLI::App app("Trains a small language model and lets it write");
  Options options;
  app.add_option("--corpus", options.corpus, "folder that lockstep tokenize wrote")->required();
  app.add_option("--directory", options.directory, "of checkpoints and the model")
      ->capture_default_str();
  app.add_option("--prompt", options.prompt, "what the sample begins with")->capture_default_str();
  const auto number = [&](const char* name, int64_t& value, const char* what) {
    app.add_option(name, value, what)->check(example::positive())->capture_default_str();
  };
  number("--steps", options.steps, "of training");
  number("--save-every", options.save_every, "every this many steps");
  number("--sequence-length", options.sequence_length, "tokens");
  number("--layers", options.layers, "of the model");
  number("--hidden", options.hidden, "its width");
  number("--heads", options.heads, "of attention");
  number("--sample-tokens", options.sample_tokens, "that it writes at the end");
  example::add_training_options(app, options);
  const auto body = [&] { train(lockstep::World::from_env(), options); };
  return example::run(app, argc, argv, body, example::Result::InFiles);
}
