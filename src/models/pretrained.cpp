#include "lockstep/models/pretrained.h"

#include <fmt/format.h>
#include <torch/torch.h>

#include <filesystem>
#include <nlohmann/json.hpp>
#include <system_error>

#include "comm/transport.h"
#include "lockstep/checkpoint/interchange.h"
#include "lockstep/checkpoint/tensor_files.h"
#include "lockstep/core/error.h"
#include "text/files.h"

namespace lockstep::models {
namespace {

using Json = nlohmann::json;

class Config {
 public:
  Config(std::string_view text, std::string_view where)
      : where_(where), all_(Json::parse(text, nullptr, false)) {
    if (!all_.is_object()) fail("this is not a JSON object");
  }

  TransformerOptions options() {
    if (at("model_type") != "qwen3") {
      fail(fmt::format("model_type is {}; qwen3 is known", at("model_type").dump()));
    }
    if (at("architectures").is_array() &&
        at("architectures") != Json::array({"Qwen3ForCausalLM"})) {
      fail(fmt::format("architectures is {}; Qwen3ForCausalLM is known",
                       at("architectures").dump()));
    }
    only("attention_bias", false);
    only("use_sliding_window", false);
    only("hidden_act", "silu");
    only("attention_dropout", 0.0);
    if (at("layer_types").is_array()) {
      for (const Json& type : at("layer_types")) {
        if (type != "full_attention")
          fail(fmt::format("layer_types has {}; full_attention is known", type.dump()));
      }
    }
    TransformerOptions out;
    out.vocabulary = whole("vocab_size");
    out.layers = whole("num_hidden_layers");
    out.hidden = whole("hidden_size");
    out.feed_forward = whole("intermediate_size");
    out.heads = whole("num_attention_heads");
    out.kv_heads = at("num_key_value_heads").is_null() ? out.heads : whole("num_key_value_heads");
    out.head_dim = whole("head_dim");
    out.max_length = whole("max_position_embeddings");
    out.tied = at("tie_word_embeddings").is_boolean() && at("tie_word_embeddings").get<bool>();
    out.norm_eps = real(at("rms_norm_eps"), "rms_norm_eps", 1e-6);
    out.initial_deviation = real(at("initializer_range"), "initializer_range", 0.02);
    out.rope_theta = theta();
    return out;
  }

 private:
  [[noreturn]] void fail(const std::string& what) const {
    throw ConfigError(fmt::format("[transformer] {}: {}", where_, what));
  }
  const Json& at(const char* name) const {
    static const Json null;
    const auto found = all_.find(name);
    return found == all_.end() ? null : *found;
  }
  void only(const char* name, const Json& known) const {
    if (!at(name).is_null() && at(name) != known) {
      fail(fmt::format("{} is {}; {} is known", name, at(name).dump(), known.dump()));
    }
  }
  int64_t whole(const char* name) const {
    if (!at(name).is_number_integer())
      fail(fmt::format("{} is {}, not a whole number", name, at(name).dump()));
    return at(name).get<int64_t>();
  }
  double real(const Json& value, const char* name, double missing) const {
    if (value.is_null()) return missing;
    if (!value.is_number()) fail(fmt::format("{} is {}, not a number", name, value.dump()));
    return value.get<double>();
  }
  // transformers 4 has rope_theta and rope_scaling, 5 has rope_parameters.
  double theta() const {
    for (const char* name : {"rope_scaling", "rope_parameters"}) {
      const Json& rope = at(name);
      if (!rope.is_object()) continue;
      for (const char* kind : {"rope_type", "type"}) {
        if (rope.contains(kind) && rope[kind] != "default") {
          fail(fmt::format("{}.{} is {}; \"default\" is known", name, kind, rope[kind].dump()));
        }
      }
      if (rope.contains("rope_theta")) return real(rope["rope_theta"], "rope_theta", 0);
    }
    return real(at("rope_theta"), "rope_theta", 10000);
  }

  std::string where_;
  Json all_;
};

// A tied head that is stored must be the embedding.
void check_stored_head(const std::string& folder) {
  const auto files = checkpoint::open_tensors(folder);
  const auto head = files->tensors().find("lm_head.weight");
  if (head == files->tensors().end()) return;
  const auto embedding = files->tensors().find("model.embed_tokens.weight");
  if (embedding == files->tensors().end() || head->second.dtype != embedding->second.dtype ||
      head->second.sizes != embedding->second.sizes ||
      files->read("lm_head.weight").view() != files->read("model.embed_tokens.weight").view()) {
    throw CheckpointError(
        fmt::format("[checkpoint] {}: tie_word_embeddings is true, and lm_head.weight is not "
                    "model.embed_tokens.weight",
                    folder));
  }
}

std::string dtype_name(at::ScalarType dtype) {
  switch (dtype) {
    case at::kFloat:
      return "float32";
    case at::kDouble:
      return "float64";
    case at::kBFloat16:
      return "bfloat16";
    case at::kHalf:
      return "float16";
    default:
      throw ConfigError(
          fmt::format("[transformer] save: no config.json names {}", comm::name_of(dtype)));
  }
}

}  // namespace

TransformerOptions transformer_options(std::string_view config, std::string_view where) {
  return Config(config, where).options();
}

Transformer load_transformer(const std::string& folder, const LoadTransformerOptions& options) {
  const std::string path = folder + "/config.json";
  auto sizes = transformer_options(text::read_file(path), path);
  sizes.dropout = options.dropout;
  Transformer net(sizes);
  net->to(options.dtype);
  checkpoint::LoadOptions loading{.allow_conversion = {"*"}};
  if (net->options.tied) {
    check_stored_head(folder);
    loading.allow_unexpected = {"lm_head.weight"};
  }
  load_module(net, folder, loading);
  return net;
}

void save_transformer(const Transformer& net, const std::string& folder,
                      const SaveTransformerOptions& options) {
  const auto& o = net->options;
  const std::string dtype = dtype_name(net->model->embed_tokens->weight.scalar_type());
  checkpoint::save_safetensors(net, folder, {.max_shard_bytes = options.max_shard_bytes});
  nlohmann::ordered_json config = {
      {"architectures", {"Qwen3ForCausalLM"}},
      {"attention_bias", false},
      {"attention_dropout", 0.0},
      {"head_dim", o.head_dim},
      {"hidden_act", "silu"},
      {"hidden_size", o.hidden},
      {"initializer_range", o.initial_deviation},
      {"intermediate_size", o.feed_forward},
      {"max_position_embeddings", o.max_length},
      {"model_type", "qwen3"},
      {"num_attention_heads", o.heads},
      {"num_hidden_layers", o.layers},
      {"num_key_value_heads", o.kv_heads},
      {"rms_norm_eps", o.norm_eps},
      {"rope_theta", o.rope_theta},  // for transformers 4
      {"rope_parameters", {{"rope_type", "default"}, {"rope_theta", o.rope_theta}}},
      {"tie_word_embeddings", o.tied},
      {"torch_dtype", dtype},
      {"use_sliding_window", false},
      {"vocab_size", o.vocabulary},
  };
  const std::string generation = folder + "/generation_config.json";
  if (!options.stop.empty()) {
    const nlohmann::ordered_json stops = {{"eos_token_id", options.stop}};
    text::write_file(generation, stops.dump(2) + "\n");
    config["eos_token_id"] = options.stop.front();
  } else {
    // Another model's would end texts at tokens that mean something else in this one.
    std::error_code ignored;
    std::filesystem::remove(generation, ignored);
  }
  text::write_file(folder + "/config.json", config.dump(2) + "\n");
}

}  // namespace lockstep::models
