// The model that plays users.
#include <fmt/format.h>

#include <algorithm>

#include "lockstep/core/error.h"
#include "lockstep/models/generate.h"
#include "rl/policy/encode.h"
#include "rl/policy/markers.h"
#include "rl/run/policy.h"

namespace lockstep::rl {

Voice frozen_voice(const models::Transformer& net, const text::Tokenizer& tokenizer,
                   const RunOptions& options) {
  const auto end = tokenizer.id_of(kMessageEnd);
  if (!end)
    throw ConfigError("[three_domain] the tokenizer has no <|im_end|>, which ends messages");
  const at::NoGradGuard no_grad;
  models::Transformer frozen(net->options);
  frozen->to(net->head_weight().device());
  if (options.precision == "bf16") frozen->to(at::kBFloat16);
  frozen->eval();
  const auto from = net->parameters(), to = frozen->parameters();
  for (size_t i = 0; i < from.size(); ++i) {
    to[i].set_requires_grad(false);
    at::Tensor(to[i]).copy_(from[i]);
  }
  models::GenerateOptions sampling{
      .temperature = options.eval_temperature, .stop = {*end}, .vocabulary = tokenizer.size()};
  return [=, most = options.max_new_tokens](const std::string& prompt, uint64_t key) mutable {
    const auto ids = encode_chat(tokenizer, prompt);
    const int64_t room = frozen->options.max_length - static_cast<int64_t>(ids.size());
    if (room < 1) {
      throw EnvironmentError(
          fmt::format("[three_domain] --user model: what the user has to read are {} tokens, and "
                      "the model has {} positions",
                      ids.size(), frozen->options.max_length));
    }
    sampling.max_new_tokens = std::min(most, room);
    sampling.seed = key;
    auto written = models::generate(frozen, {ids}, sampling).front();
    if (!written.empty() && written.back() == *end) written.pop_back();
    return tokenizer.decode(written);
  };
}

}  // namespace lockstep::rl
