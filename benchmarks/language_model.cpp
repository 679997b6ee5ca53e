// Times a transformer that writes text, or learns, and a tokenizer, as peers/language_model.py
// does. Prints one JSON line, with what the two must have in common.
#include <fmt/format.h>
#include <lockstep/models/generate.h>
#include <lockstep/models/pretrained.h>
#include <lockstep/parallel/fused_adam.h>
#include <lockstep/text/tokenizer.h>
#include <torch/torch.h>

#include <CLI/CLI.hpp>
#include <chrono>
#include <ctime>
#include <fstream>
#include <nlohmann/json.hpp>

namespace {

using Clock = std::chrono::steady_clock;
using Ids = std::vector<int32_t>;

struct Options {
  std::string path, corpus;
  int64_t tokens = 64, repeats = 5, length = 8, batch = 1;
  int threads = 1;
};

double process_ms() { return 1e3 * static_cast<double>(std::clock()) / CLOCKS_PER_SEC; }

double median(std::vector<double> values) {
  std::nth_element(values.begin(), values.begin() + std::ssize(values) / 2, values.end());
  return values[values.size() / 2];
}

// Milliseconds of each repeat after the first, and of the processor's time.
template <class F>
nlohmann::json timed(const Options& options, const F& run) {
  std::vector<double> wall, busy;
  for (int64_t i = 0; i <= options.repeats; ++i) {
    const auto begin = Clock::now();
    const double begin_busy = process_ms();
    run();
    const std::chrono::duration<double, std::milli> took = Clock::now() - begin;
    if (i == 0) continue;
    wall.push_back(took.count());
    busy.push_back(process_ms() - begin_busy);
  }
  return {{"ms", median(wall)}, {"cpu_ms", median(busy)}};
}

// Rows of the peer's ids.
std::vector<Ids> rows_of(const Options& options, int64_t vocabulary) {
  std::vector<Ids> rows(static_cast<size_t>(options.batch));
  for (int64_t row = 0; row < options.batch; ++row) {
    for (int64_t i = 0; i < options.length; ++i) {
      rows[static_cast<size_t>(row)].push_back(
          static_cast<int32_t>((i * 7 + row * 13) % (vocabulary - 3) + 3));
    }
  }
  return rows;
}

nlohmann::json generate(const Options& options) {
  auto net = lockstep::models::load_transformer(options.path);
  const auto prompts = rows_of(options, net->options.vocabulary);
  std::vector<Ids> texts;
  nlohmann::json line = timed(options, [&] {
    texts = lockstep::models::generate(net, prompts, {.max_new_tokens = options.tokens});
  });
  line["result"] = texts;
  return line;
}

nlohmann::json train(const Options& options) {
  auto net = lockstep::models::load_transformer(options.path);
  std::vector<at::Tensor> rows;
  for (const auto& row : rows_of(options, net->options.vocabulary))
    rows.push_back(torch::tensor(row, torch::kLong));
  const at::Tensor ids = torch::stack(rows);
  const at::Tensor targets = torch::cat(
      {ids.slice(1, 1), torch::full({options.batch, 1}, int64_t{-100}, torch::kLong)}, 1);
  lockstep::FusedAdamW adam(net->parameters(), torch::optim::AdamWOptions(1e-3).weight_decay(0.01));
  std::vector<double> losses;
  nlohmann::json line = timed(options, [&] {
    adam.zero_grad();
    const at::Tensor loss = net->forward(ids, targets);
    loss.backward();
    adam.step();
    losses.push_back(loss.item<double>());
  });
  line["result"] = losses;
  return line;
}

// Whole lines, about 10 kB at a time.
nlohmann::json encode(const Options& options) {
  const auto tokenizer = lockstep::Tokenizer::from_file(options.path);
  std::ifstream file(options.corpus);
  std::vector<std::string> pieces(1);
  for (std::string text; std::getline(file, text);) {
    if (pieces.back().size() > 10'000) pieces.emplace_back();
    pieces.back() += text;
    if (!file.eof()) pieces.back() += '\n';
  }
  int64_t count = 0, sum = 0;
  nlohmann::json line = timed(options, [&] {
    count = sum = 0;
    for (const auto& piece : pieces) {
      const auto ids = tokenizer.encode(piece);
      count += std::ssize(ids);
      for (size_t i = 0; i < ids.size(); ++i) sum += ids[i] * static_cast<int64_t>(i + 1);
    }
  });
  line["result"] = {count, sum};
  return line;
}

}  // namespace

int main(int argc, char** argv) {
  CLI::App app("Times language models and tokenizers");
  Options options;
  std::string what;
  app.add_option("what", what)->required()->check(CLI::IsMember({"generate", "train", "encode"}));
  app.add_option("path", options.path, "a folder of Hugging Face's, or a tokenizer")->required();
  const auto number = [&](const char* name, auto& value, const char* text) {
    app.add_option(name, value, text)->check(CLI::Range(1, 1'000'000))->capture_default_str();
  };
  number("--tokens", options.tokens, "generate: of each sequence");
  number("--batch", options.batch, "sequences");
  number("--length", options.length, "tokens of a prompt, or of a sequence to learn");
  number("--steps", options.repeats, "of which the median counts");
  number("--threads", options.threads, "");
  app.add_option("--corpus", options.corpus, "encode: a text");
  CLI11_PARSE(app, argc, argv);
  try {
    at::set_num_threads(options.threads);
    const nlohmann::json line = what == "generate" ? generate(options)
                                : what == "train"  ? train(options)
                                                   : encode(options);
    std::puts(line.dump().c_str());
  } catch (const std::exception& error) {
    fmt::print(stderr, "error: {}\n", error.what());
    return 1;
  }
}
