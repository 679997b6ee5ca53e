"""A random Qwen 3 of Hugging Face's that writes text, or learns, and PyPI's tokenizers, as
language_model.cpp does. The folder of the model is made when it is not there. The JSON line has
milliseconds, those of the processor, and what the two must have in common.
"""

import os
import statistics
import time

import common


def sizes(args):
    heads = args.hidden // args.head_dim
    return dict(
        vocab_size=args.vocabulary,
        hidden_size=args.hidden,
        intermediate_size=3 * args.hidden,
        num_hidden_layers=args.layers,
        num_attention_heads=heads,
        num_key_value_heads=max(1, heads // 2),
        head_dim=args.head_dim,
    )


def model_of(args):
    import torch
    from transformers import AutoModelForCausalLM, Qwen3Config, Qwen3ForCausalLM

    torch.set_num_threads(args.threads)
    if not os.path.exists(os.path.join(args.path, "config.json")):
        torch.manual_seed(args.seed)
        config = Qwen3Config(
            **sizes(args),
            max_position_embeddings=1024,
            tie_word_embeddings=True,
            attention_bias=False,
            rope_parameters={"rope_type": "default", "rope_theta": 1e6},
            bos_token_id=1,
            eos_token_id=2,
        )
        model = Qwen3ForCausalLM(config)
        with torch.no_grad():  # so wide that the next token depends on the others
            for p in model.parameters():
                if p.dim() > 1:
                    p.copy_(torch.randn_like(p) * 1.5 / p.shape[-1] ** 0.5)
        model.save_pretrained(args.path)
    model = AutoModelForCausalLM.from_pretrained(args.path, dtype=torch.float32)
    rows = torch.arange(args.batch).unsqueeze(1) * 13
    columns = torch.arange(args.length).unsqueeze(0) * 7
    return torch, model, (columns + rows) % (args.vocabulary - 3) + 3


def timed(args, run):
    wall, cpu = [], []
    for _ in range(args.steps + 1):
        begin, busy = time.perf_counter(), time.process_time()
        result = run()
        wall.append((time.perf_counter() - begin) * 1e3)
        cpu.append((time.process_time() - busy) * 1e3)
    return dict(ms=statistics.median(wall[1:]), cpu_ms=statistics.median(cpu[1:]), result=result)


def generate(args):
    torch, model, ids = model_of(args)
    model.eval()

    def run():
        with torch.inference_mode():
            return model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=args.tokens,
                do_sample=False,
                eos_token_id=None,
                pad_token_id=0,
            )[:, args.length :].tolist()

    return timed(args, run)


def train(args):
    torch, model, ids = model_of(args)
    model.train()
    adam = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.01, fused=True)
    losses = []

    def run():
        adam.zero_grad()
        loss = model(ids, labels=ids, use_cache=False).loss
        loss.backward()
        adam.step()
        losses.append(loss.item())
        return losses

    return timed(args, run)


def encode(args):
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(args.path)
    pieces = [b""]
    with open(args.corpus, "rb") as file:
        for line in file:
            if len(pieces[-1]) > 10_000:
                pieces.append(b"")
            pieces[-1] += line
    texts = [piece.decode() for piece in pieces]

    def run():
        return [tokenizer.encode(text, add_special_tokens=False).ids for text in texts]

    line = timed(args, run)
    ids = line["result"]
    total = sum(token * (i + 1) for piece in ids for i, token in enumerate(piece))
    return line | dict(result=[sum(map(len, ids)), total])


def main():
    p = common.parser(__doc__, world=1, steps=5)
    p.add_argument("what", choices=["generate", "train", "encode"])
    p.add_argument("path")
    p.add_argument("--corpus")
    for name, value in dict(
        tokens=64, batch=1, length=8, vocabulary=512, hidden=64, layers=2, head_dim=32
    ).items():
        p.add_argument("--" + name.replace("_", "-"), type=int, default=value)
    args = p.parse_args()
    common.emit(args, dict(peer="huggingface", **globals()[args.what](args)))


main()
