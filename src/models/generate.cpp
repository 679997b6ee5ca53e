#include "lockstep/models/generate.h"

#include <fmt/format.h>
#include <torch/torch.h>

#include <algorithm>

#include "lockstep/core/error.h"
#include "models/evaluation_mode.h"
#include "models/sampling.h"

namespace lockstep::models {
namespace {

class Generation {
 public:
  Generation(Transformer& net, const std::vector<std::vector<int32_t>>& prompts,
             const GenerateOptions& options)
      : net_(*net), options_(options), out_(prompts.size()) {
    check(prompts);
    for (size_t i = 0; i < prompts.size(); ++i) live_.push_back({i, prompts[i]});
    vocabulary_ = options.vocabulary > 0 ? std::min(options.vocabulary, net_.options.vocabulary)
                                         : net_.options.vocabulary;
  }

  std::vector<std::vector<int32_t>> run() {
    if (live_.empty() || options_.max_new_tokens == 0) return std::move(out_);
    const at::InferenceMode no_grad;
    const EvaluationMode evaluation(net_);
    const size_t longest = longest_of_live();
    std::optional<KvCache> cache;
    if (options_.cached) {
      cache.emplace(net_.make_cache(static_cast<int64_t>(live_.size()),
                                    static_cast<int64_t>(longest) + options_.max_new_tokens - 1));
    }
    at::Tensor last = prompt_hidden(cache ? &*cache : nullptr);
    for (int64_t step = 1;; ++step) {
      draw(net_.head(last));
      if (step == options_.max_new_tokens || !remove_finished(cache ? &*cache : nullptr)) break;
      if (!cache) {
        last = prompt_hidden(nullptr);
        continue;
      }
      std::vector<int64_t> newest;
      for (const auto& sequence : live_) newest.push_back(sequence.ids.back());
      last =
          net_.hidden(on_device(at::tensor(newest, at::kLong).unsqueeze(1)), *cache).select(1, 0);
    }
    return std::move(out_);
  }

 private:
  struct Sequence {
    size_t prompt;
    std::vector<int32_t> ids;
    bool finished = false;
  };

  void check(const std::vector<std::vector<int32_t>>& prompts) const {
    const auto fail = [](const std::string& what) {
      throw ConfigError("[transformer] generate: " + what);
    };
    const auto& o = options_;
    if (o.max_new_tokens < 0 || !(o.temperature >= 0) || o.top_k < 0 ||
        !(o.top_p > 0 && o.top_p <= 1) || o.vocabulary < 0) {
      fail(
          fmt::format("max_new_tokens = {}, temperature = {}, top_k = {}, top_p = {}, vocabulary = "
                      "{}: temperature is 0 or more, top_p in (0, 1]",
                      o.max_new_tokens, o.temperature, o.top_k, o.top_p, o.vocabulary));
    }
    for (size_t i = 0; i < prompts.size(); ++i) {
      if (prompts[i].empty())
        fail(fmt::format("the prompt {} is empty; begin with a token that begins texts", i));
      const auto length = static_cast<int64_t>(prompts[i].size());
      if (o.max_new_tokens > net_.options.max_length - length) {
        fail(fmt::format("the prompt {} of {} tokens and {} new ones are more than max_length = {}",
                         i, length, o.max_new_tokens, net_.options.max_length));
      }
      for (const int32_t id : prompts[i]) {
        if (id < 0 || id >= net_.options.vocabulary)
          fail(fmt::format("the prompt {} has the token {}; the vocabulary is {}", i, id,
                           net_.options.vocabulary));
      }
    }
  }

  size_t longest_of_live() const {
    size_t longest = 0;
    for (const auto& sequence : live_) longest = std::max(longest, sequence.ids.size());
    return longest;
  }

  at::Tensor on_device(const at::Tensor& tensor) const {
    return tensor.to(net_.head_weight().device());
  }

  // Of all live sequences from their begin, that of the last token. They are filled up after
  // their ends, which a causal model does not see.
  at::Tensor prompt_hidden(KvCache* cache) {
    const auto n = static_cast<int64_t>(live_.size());
    const auto longest = static_cast<int64_t>(longest_of_live());
    at::Tensor ids = at::zeros({n, longest}, at::kLong);
    std::vector<int64_t> lengths;
    for (int64_t i = 0; i < n; ++i) {
      const auto& own = live_[static_cast<size_t>(i)].ids;
      std::copy(own.begin(), own.end(), ids.mutable_data_ptr<int64_t>() + i * longest);
      lengths.push_back(static_cast<int64_t>(own.size()));
    }
    ids = on_device(ids);
    const at::Tensor hidden = cache != nullptr ? net_.hidden(ids, *cache) : net_.hidden(ids);
    if (cache != nullptr) cache->set_lengths(lengths);
    const at::Tensor ends = on_device(at::tensor(lengths, at::kLong)) - 1;
    return hidden.index({torch::arange(n, ends.options()), ends});
  }

  void draw(const at::Tensor& logits) {
    const at::Tensor rows = logits.slice(1, 0, vocabulary_).to(at::kCPU, at::kFloat).contiguous();
    for (size_t i = 0; i < live_.size(); ++i) {
      auto& sequence = live_[i];
      const std::span row(rows.const_data_ptr<float>() + static_cast<int64_t>(i) * vocabulary_,
                          static_cast<size_t>(vocabulary_));
      const double u = options_.temperature == 0
                           ? 0
                           : uniform(options_.seed,
                                     options_.first_sample + static_cast<int64_t>(sequence.prompt),
                                     static_cast<int64_t>(sequence.ids.size()));
      const int32_t token = sample_token(row, options_, u);
      sequence.ids.push_back(token);
      out_[sequence.prompt].push_back(token);
      sequence.finished =
          std::find(options_.stop.begin(), options_.stop.end(), token) != options_.stop.end();
      if (!options_.on_token) continue;
      const c10::InferenceMode inference(inference_);
      const at::AutoGradMode grad(grad_);
      options_.on_token(sequence.prompt, token);
    }
  }

  // False when none is left.
  bool remove_finished(KvCache* cache) {
    std::vector<int64_t> kept;
    for (size_t i = 0; i < live_.size(); ++i) {
      if (!live_[i].finished) kept.push_back(static_cast<int64_t>(i));
    }
    if (kept.size() == live_.size()) return true;
    if (cache != nullptr && !kept.empty()) cache->keep(kept);
    std::erase_if(live_, [](const Sequence& sequence) { return sequence.finished; });
    return !live_.empty();
  }

  TransformerImpl& net_;
  const GenerateOptions options_;  // which on_token may change where it has them from
  // The caller's, in which on_token runs.
  const bool inference_ = c10::InferenceMode::is_enabled(), grad_ = at::GradMode::is_enabled();
  int64_t vocabulary_ = 0;
  std::vector<Sequence> live_;
  std::vector<std::vector<int32_t>> out_;
};

}  // namespace

std::vector<std::vector<int32_t>> generate(Transformer& net,
                                           const std::vector<std::vector<int32_t>>& prompts,
                                           const GenerateOptions& options) {
  return Generation(net, prompts, options).run();
}

}  // namespace lockstep::models
