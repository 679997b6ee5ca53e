"""Draws a terminal's recording, as script(1) writes it, as an SVG.

python3 docs/pictures/draw.py NAME      NAME.typescript, beside this file, becomes NAME.svg

Long lines are broken at WIDTH columns, as a terminal breaks them; what a carriage return overwrites is gone.
"""
import html
import pathlib
import re
import sys

WIDTH = 118
COLUMN, ROW, SIZE, MARGIN = 7.25, 17, 12, 16
INK = {"30": "#6e7681", "31": "#ff7b72", "32": "#7ee787", "33": "#e3b341",
       "34": "#79c0ff", "35": "#d2a8ff", "36": "#76e3ea", "37": "#c9d1d9"}
PAPER, TEXT, STRONG = "#0d1117", "#c9d1d9", "#ffffff"

folder = pathlib.Path(__file__).resolve().parent
recording = (folder / f"{sys.argv[1]}.typescript").read_bytes().decode(errors="replace")
recording = re.sub(r"^Script (started|done)[^\n]*\n?", "", recording, flags=re.MULTILINE)

lines, row, column, ink = [[]], 0, 0, TEXT  # a line is a list of (character, colour)
for token in re.findall(r"\x1b\[[\d;]*[A-Za-z]|.|\n", re.sub("\r+\n", "\n", recording)):
    if token.startswith("\x1b["):
        codes = token[2:-1].split(";")
        if token.endswith("K"):
            del lines[row][column:]
        for code in codes if token.endswith("m") else []:
            ink = TEXT if code in ("", "0") else STRONG if code == "1" else INK.get(code, ink)
    elif token == "\n":
        lines.append([])
        row, column = row + 1, 0
    elif token == "\r":
        column = 0
    elif token.isprintable():
        lines[row][column:column + 1] = [(token, ink)]
        column += 1

rows = []
for line in lines:
    rows += [line[at:at + WIDTH] for at in range(0, len(line), WIDTH)] or [[]]
while rows and not rows[-1]:
    rows.pop()

out = []
for number, line in enumerate(rows):
    at = 0
    while at < len(line):
        end = at
        while end < len(line) and line[end][1] == line[at][1]:
            end += 1
        text = "".join(character for character, _ in line[at:end])
        if text.strip():
            weight = ' font-weight="bold"' if line[at][1] == STRONG else ""
            out.append(f'<text x="{MARGIN + at * COLUMN:.1f}" y="{MARGIN + number * ROW + SIZE}" '
                       f'fill="{line[at][1]}"{weight} textLength="{len(text.rstrip()) * COLUMN:.1f}">'
                       f'{html.escape(text.rstrip(), quote=False)}</text>')
        at = end
width, height = 2 * MARGIN + WIDTH * COLUMN, 2 * MARGIN + len(rows) * ROW
(folder / f"{sys.argv[1]}.svg").write_text(
    f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:.0f} {height}" '
    f'font-size="{SIZE}" xml:space="preserve" '
    f'font-family="ui-monospace, SFMono-Regular, Menlo, Consolas, \'DejaVu Sans Mono\', monospace">\n'
    f'<rect width="100%" height="100%" rx="8" fill="{PAPER}"/>\n' + "\n".join(out) + "\n</svg>\n")
