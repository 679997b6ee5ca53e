"""Small random models of transformers and what they compute: transformer_peer.py make FOLDER, or
... check FOLDER, which reads the models that transformer_test.cpp has saved and compares them with
what it computed.

make: FOLDER/{tied,untied,sharded}/ with config.json, weights, and expected.safetensors: ids, logits,
loss, a gradient for each parameter, padded (prompts of other lengths), greedy and bf16 logits.
"""

import pathlib
import sys

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, Qwen3Config, Qwen3ForCausalLM


def make(folder, name, tied, shard, **other):
    torch.manual_seed(1234)
    sizes = dict(
        vocab_size=320,
        hidden_size=64,
        intermediate_size=160,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=512,
    )
    config = Qwen3Config(
        **(sizes | other),
        rms_norm_eps=1e-6,
        tie_word_embeddings=tied,
        attention_bias=False,
        rope_parameters={"rope_type": "default", "rope_theta": 1e6},
        bos_token_id=1,
        eos_token_id=2
    )
    config._attn_implementation = "eager"
    model = Qwen3ForCausalLM(config).eval()
    with torch.no_grad():  # norms begin as ones: each weight is to matter
        for key, p in model.named_parameters():
            wide = 0.25 if "embed" in key or "lm_head" in key else 1.5 / p.shape[-1] ** 0.5
            p.copy_(1 + 0.3 * torch.randn_like(p) if p.dim() == 1 else torch.randn_like(p) * wide)
    model.save_pretrained(folder / name, max_shard_size="120KB" if shard else "5GB")
    ids = torch.randint(3, config.vocab_size, (2, 12), generator=torch.Generator().manual_seed(5))
    logits = model(ids).logits
    out = {"ids": ids, "logits": logits}
    loss = torch.nn.functional.cross_entropy(
        logits[:, :-1].reshape(-1, config.vocab_size), ids[:, 1:].reshape(-1)
    )
    loss.backward()
    out["loss"] = loss
    for key, p in model.named_parameters():
        out["grad." + key] = p.grad.clone()
    with torch.no_grad():
        out["greedy"] = model.generate(
            ids[:, :8], max_new_tokens=12, do_sample=False, eos_token_id=None, pad_token_id=0
        )
        mask = torch.ones_like(ids)
        mask[0, :4] = 0
        out["padded"] = model.generate(
            ids * mask,
            attention_mask=mask,
            max_new_tokens=12,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
        )
        out["bf16"] = model.to(torch.bfloat16)(ids).logits.float()
    save_file(
        {key: value.detach().contiguous().clone() for key, value in out.items()},
        folder / name / "expected.safetensors",
    )


def check(folder):
    for name in ("tied", "untied", "sharded"):
        path = folder / name / "ours"
        model, info = AutoModelForCausalLM.from_pretrained(
            path, dtype=torch.float32, output_loading_info=True
        )
        assert not info["missing_keys"] and not info["unexpected_keys"], info
        assert model.config.rope_parameters["rope_theta"] == 1e6, model.config
        expected = load_file(folder / name / "expected.safetensors")
        with torch.no_grad():
            error = (model(expected["ids"]).logits - expected["logits"]).abs().max().item()
        assert error < 1e-4, (name, error)
        shards = list(path.glob("*.safetensors"))
        assert (len(shards) > 1) == (name == "sharded"), shards


if __name__ == "__main__":
    torch.set_num_threads(1)
    where = pathlib.Path(sys.argv[2])
    if sys.argv[1] == "check":
        check(where)
    else:
        make(where, "tied", True, False)
        make(where, "untied", False, False, num_key_value_heads=1, num_hidden_layers=1)
        make(where, "sharded", True, True, num_hidden_layers=3)
