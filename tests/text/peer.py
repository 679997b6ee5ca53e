"""What PyPI's `tokenizers` makes of texts, for comparison. Numbers are int32, texts are files.

peer.py corpus FILE BYTES [short]     a text with every character; short: with some
peer.py qwen RANKS JSON               qwen.tiktoken as a tokenizer.json
peer.py encode JSON TEXT IDS [plain]  the text's numbers; plain: special tokens are text
peer.py decode JSON IDS TEXT [skip]   the numbers' text; skip: without special tokens
peer.py train TEXT JSON VOCABULARY    a tokenizer of the text's lines
peer.py random FOLDER COUNT           small tokenizers, n.json, with texts n.text and their numbers n.ids
peer.py speed JSON TEXT               megabytes that are encoded per second on one thread
"""

import array
import base64
import os
import pathlib
import random
import sys
import time
import unicodedata

os.environ["TOKENIZERS_PARALLELISM"] = "false"
os.environ["RAYON_NUM_THREADS"] = "1"
from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    trainers,
)

PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)
SPECIAL = [
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|object_ref_start|>",
    "<|object_ref_end|>",
    "<|box_start|>",
    "<|box_end|>",
    "<|quad_start|>",
    "<|quad_end|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|vision_pad|>",
    "<|image_pad|>",
    "<|video_pad|>",
]
PLAIN = [
    "<tool_call>",
    "</tool_call>",
    "<|fim_prefix|>",
    "<|fim_middle|>",
    "<|fim_suffix|>",
    "<|fim_pad|>",
    "<|repo_name|>",
    "<|file_sep|>",
    "<tool_response>",
    "</tool_response>",
    "<think>",
    "</think>",
]
SAMPLES = [
    "Hello, world! You are a helpful assistant.",
    "I'm sure it's they'RE we'Ve I'D don't 'twas O'Neil 'ſ",
    "  leading and   inner  spaces ",
    "tabs\tand\n\nnew lines\r\n\r\n  end  \n",
    "3.14159 1,000,000 ２３ ½ Ⅷ ٣",
    "snake_case camelCase a.b.c x=y+z; //comment",
    '{"name": "f", "arguments": {"id": "R4821", "n": 2}}\n',
    "<|im_start|>user\nhi<|im_end|>\n<think>\n\n</think>",
    "分布式数据并行训练（DDP）详解。你好，世界！",
    "日本語のテキスト、カタカナ",
    "한국어 문장입니다",
    "Привет, как дела?",
    "العربية ١٢٣",
    "नमस्ते दुनिया",
    "🙂🚀👨‍👩‍👧‍👦🇩🇪",
    "e\u0301 vs \u00e9, A\u030a",
    "zero\u200bwidth nbsp\u00a0x\u3000",
    "a\u0085b\u000bc\u000cd\u001fe\u2028f\u2029g",
    "x" * 70,
    "   \n \n  x",
    "\x00\x01",
]


def symbols():
    keep = [*range(33, 127), *range(161, 173), *range(174, 256)]
    rest = [b for b in range(256) if b not in keep]
    return {b: chr(b) for b in keep} | {b: chr(256 + i) for i, b in enumerate(rest)}


def pipeline(tokenizer):
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PATTERN), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, trim_offsets=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()


def corpus(path, size, short=None):
    """Pieces of all kinds in random order: sources, words of all scripts, marks, emoji, bytes that
    are no text."""
    draw = random.Random(17)
    known = [
        chr(c)
        for c in range(0x110000)
        if not 0xD800 <= c < 0xE000 and unicodedata.category(chr(c)) not in ("Cn", "Co")
    ]
    blocks = [known[i : i + 96] for i in range(0, len(known), 96)]
    marks = [c for c in known if unicodedata.category(c) in ("Mn", "Mc")]
    odd = list(" \t\r\n'\u00a0\u2003sStTmMrReElLvVdD019.,<|>_")
    sources = [
        p.read_text(errors="replace")
        for folder in ("src", "docs", "tests")
        for p in sorted(pathlib.Path(folder).rglob("*"))
        if p.suffix in (".cpp", ".h", ".md", ".py")
    ]
    makers = [
        lambda: (lambda s, i: s[i : i + 400])(
            s := draw.choice(sources), draw.randrange(max(1, len(s)))
        ),
        lambda: "".join(draw.choices(draw.choice(blocks), k=draw.randrange(1, 30))),
        lambda: "".join(
            draw.choice(draw.choice(blocks)) + draw.choice(marks) * draw.randrange(3)
            for _ in range(12)
        ),
        lambda: "".join(chr(0x1100 + draw.randrange(256)) for _ in range(8)),
        lambda: "".join(draw.choices(odd, k=draw.randrange(1, 40))),
        lambda: draw.randbytes(draw.randrange(1, 60)).decode("utf-8", "replace"),
        lambda: draw.randbytes(draw.randrange(1, 60)).decode("latin-1"),
        lambda: "".join(draw.choices("abcdefghijklmnopqrstuvwxyz", k=draw.randrange(1, 200))),
        lambda: draw.choice(SAMPLES),
        lambda: draw.choice(SPECIAL + PLAIN),
    ]
    with open(path, "wb") as out:
        if not short:
            out.write("".join(known).encode())
        while out.tell() < size:
            out.write((draw.choice(makers)() + draw.choice(["", " ", "\n"])).encode())


def qwen(ranks_path, path):
    ranks = {
        base64.b64decode(line.split()[0]): int(line.split()[1]) for line in open(ranks_path, "rb")
    }
    show = symbols()
    shown = {token: "".join(show[b] for b in token) for token in ranks}
    merges = []
    for token, rank in sorted(ranks.items(), key=lambda item: item[1]):
        parts = [token[i : i + 1] for i in range(len(token))]
        while len(parts) > 2:
            best = min(
                range(len(parts) - 1), key=lambda i: ranks.get(parts[i] + parts[i + 1], 1 << 30)
            )
            assert ranks.get(parts[best] + parts[best + 1], 1 << 30) < rank, token
            parts[best : best + 2] = [parts[best] + parts[best + 1]]
        if len(parts) == 2:
            merges.append((shown[parts[0]], shown[parts[1]]))
    tokenizer = Tokenizer(models.BPE(vocab={shown[t]: r for t, r in ranks.items()}, merges=merges))
    pipeline(tokenizer)
    tokenizer.add_tokens(
        [AddedToken(s, special=s in SPECIAL, normalized=False) for s in SPECIAL + PLAIN]
    )
    tokenizer.save(path)


def encode(json, text, ids, plain=None):
    tokenizer = Tokenizer.from_file(json)
    tokenizer.encode_special_tokens = plain is not None
    found = tokenizer.encode(pathlib.Path(text).read_bytes().decode(), add_special_tokens=False).ids
    pathlib.Path(ids).write_bytes(array.array("i", found).tobytes())


def decode(json, ids, text, skip=None):
    numbers = array.array("i", pathlib.Path(ids).read_bytes())
    pathlib.Path(text).write_bytes(
        Tokenizer.from_file(json).decode(numbers, skip_special_tokens=skip is not None).encode()
    )


def train(text, json, vocabulary):
    tokenizer = Tokenizer(models.BPE())
    pipeline(tokenizer)
    trainer = trainers.BpeTrainer(
        vocab_size=int(vocabulary) - 1,
        min_frequency=2,
        show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    lines = pathlib.Path(text).read_bytes().decode().split("\n")
    tokenizer.train_from_iterator((line + "\n" for line in lines), trainer)
    tokenizer.add_special_tokens([AddedToken("<|endoftext|>", special=True, normalized=False)])
    tokenizer.save(json)


def small(folder, count):
    """Added tokens, which words may have, too, by merging, as single bytes or whole; several kinds of texts."""
    draw, show = random.Random(11), symbols()
    characters = [" ", "a", "b", "\u00e9", "\u0120", "\u00c3", "\u00a9", "\u212a", "e\u0301", "1", "."]
    for number in range(int(count)):
        vocabulary = list(show.values())
        pool, merges = [show[b] for b in " ab\u00e91.".encode()], []
        for _ in range(draw.randrange(30)):
            left, right = draw.choice(pool), draw.choice(pool)
            merges.append((left, right))
            if left + right not in vocabulary:
                vocabulary.append(left + right)
                pool.append(left + right)
        for _ in range(draw.randrange(6)):  # that no merge makes
            token = "".join(draw.choices(pool, k=draw.randrange(2, 4)))
            if token not in vocabulary:
                vocabulary.append(token)
        draw.shuffle(vocabulary)
        model = models.BPE(vocab={token: i for i, token in enumerate(vocabulary)}, merges=merges,
                           ignore_merges=draw.random() < 0.5)
        tokenizer = Tokenizer(model)
        pipeline(tokenizer)
        added = [draw.choice(pool + vocabulary[-9:] + ["".join(draw.choices(characters, k=2)), "<|x|>"])
                 for _ in range(draw.randrange(5))]
        tokenizer.add_tokens([AddedToken(token, special=draw.random() < 0.5, normalized=draw.random() < 0.3)
                              for token in added])
        path = f"{folder}/{number}"
        tokenizer.save(path + ".json")
        text = "".join(draw.choices(characters + added, k=300))
        pathlib.Path(path + ".text").write_bytes(text.encode())
        encode(path + ".json", path + ".text", path + ".ids")


def speed(json, text):
    tokenizer, whole = Tokenizer.from_file(json), pathlib.Path(text).read_bytes().decode()
    pieces = [whole[i : i + 10000] for i in range(0, len(whole), 10000)]
    best = 1e9
    for _ in range(3):
        begin = time.perf_counter()
        for piece in pieces:
            tokenizer.encode(piece, add_special_tokens=False)
        best = min(best, time.perf_counter() - begin)
    print(f"{len(whole.encode()) / best / 1e6:.3f}")


if __name__ == "__main__":
    name, *arguments = sys.argv[1:]
    if name == "corpus":
        corpus(arguments[0], int(arguments[1]), *arguments[2:])
    else:
        {"qwen": qwen, "encode": encode, "decode": decode, "train": train, "random": small, "speed": speed}[name](
            *arguments
        )
