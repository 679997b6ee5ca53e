"""Writes src/text/unicode_*.inl: which characters are letters, numbers and white space, and how text is normalised.

Both are read off PyPI's `tokenizers`, so that ids are equal: models were trained with its tables, which are of
Unicode 16 in patterns and of Unicode 9 in NFC (0.23).

.deps/peers/bin/python scripts/unicode_tables.py
"""
import pathlib
import textwrap
import unicodedata

from tokenizers import Regex, __version__, normalizers, pre_tokenizers

CHARACTERS = [c for c in range(0x110000) if not 0xD800 <= c < 0xE000]
HANGUL = range(0xAC00, 0xAC00 + 11172)  # by rule, not by table
FOLDER = pathlib.Path(__file__).parent.parent / "src" / "text"
nfc = normalizers.NFC().normalize_str


def of_class(pattern):
    split = pre_tokenizers.Split(Regex(pattern), "removed")
    return [c for c in CHARACTERS if not split.pre_tokenize_str(chr(c))]


def ranges(numbers):
    found = []
    for n in numbers:
        if found and found[-1][1] == n:
            found[-1][1] = n + 1
        else:
            found.append([n, n + 1])
    return [bound for pair in found for bound in pair]


def combining_class(c):
    """As Python's table has it, unless `tokenizers` does not know it: an older table leaves the order as it is."""
    own = unicodedata.combining(chr(c))
    if not own:
        return 0
    for mark in "\u0334\u0323\u0301\u0345":
        other = unicodedata.combining(mark)
        first, second = (chr(c), mark) if own > other else (mark, chr(c))
        if own != other and nfc("\u0600" + first + second) != "\u0600" + second + first:
            return 0
    return own


def numbers(name, values, say):
    lines = textwrap.fill(", ".join(say(v) for v in values), 98, break_long_words=False)
    return f"constexpr uint32_t {name}[] = {{\n{textwrap.indent(lines, '  ')}}};\n"


def write(name, about, tables):
    head = (f"// Written by scripts/unicode_tables.py, read off tokenizers {__version__}.\n"
            f"// {about}\n// clang-format off\n")
    (FOLDER / name).write_text(head + "".join(tables) + "// clang-format on\n")


write("unicode_classes.inl", "First and one after the last.",
      [numbers(name, ranges(of_class(pattern)), str)
       for name, pattern in (("kLetters", r"\p{L}"), ("kNumbers", r"\p{N}"), ("kSpaces", r"\s"))])
classes = {c: combining_class(c) for c in CHARACTERS}
marks, decompositions, excluded = [], [], []
for c in CHARACTERS:
    if classes[c]:
        if marks and marks[-1][1] == c and marks[-1][2] == classes[c]:
            marks[-1][1] = c + 1
        else:
            marks.append([c, c + 1, classes[c]])
    parts = unicodedata.decomposition(chr(c))
    if not parts or parts.startswith("<") or c in HANGUL:
        continue
    parts = [int(part, 16) for part in parts.split()]
    composed = nfc("".join(map(chr, parts))) == chr(c)
    if not composed and nfc(chr(c)) == chr(c):
        continue  # younger than the table there
    decompositions.append((c, parts[0], parts[1] if len(parts) == 2 else 0))
    if len(parts) == 2 and not composed:
        excluded.append(c)
write("unicode_decompositions.inl", "Character, its first part, its second or 0.",
      [numbers("kDecompositions", [n for row in decompositions for n in row], str)])
write("unicode_marks.inl", "What is never composed; ranges of marks and their class.",
      [numbers("kNeverComposed", excluded, str), numbers("kMarks", [n for row in marks for n in row], str)])
