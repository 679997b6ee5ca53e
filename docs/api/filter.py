"""Doxygen's input filter: the headers' plain // comments as documentation comments.

A comment block above a declaration documents what follows it, up to the next empty line or comment; one at the end of
a line documents what stands before it, and the block at the top of a file the file. Lines of a comment that are
indented by two or more spaces beyond the text are code.
"""
import re
import sys

COMMENT = re.compile(r"^(\s*)//(?: (.*)|)$")
TRAILING = re.compile(r"""^((?:[^"/]|/(?!/)|"(?:[^"\\]|\\.)*")*\S)\s+// (.*)$""")
EMPTY = re.compile(r"^\s*$")
ENDS_PARAGRAPH = re.compile(r"\s*(//|};?$|public:|private:|protected:|#)")


def escaped(text):
    """The comment's words are not commands, tags or anchors; what stands between backquotes is taken as it is."""
    parts = re.split(r"(`[^`]*`)", text)
    return "".join(part if part.startswith("`") else re.sub(r"([\\@<>&#$%\"])", r"\\\1", part).replace("::", "\\::")
                   for part in parts)


def block(indent, lines):
    """One comment block, its code between @code and @endcode."""
    out, code = [], False
    for line in lines:
        is_code = line.startswith("   ") and bool(line.strip())
        if is_code != code and (is_code or line.strip()):
            out.append(f"{indent}/// " + ("@code{.cpp}" if is_code else "@endcode"))
            code = is_code
        out.append(f"{indent}/// " + (line if code else escaped(line)))
    return out + ([f"{indent}/// @endcode"] if code else [])


def paragraph(lines, at):
    """The declarations from `at` to the next empty line, comment or change of access, when there are several."""
    found = []
    while at < len(lines) and not EMPTY.match(lines[at]) and not ENDS_PARAGRAPH.match(lines[at]):
        if TRAILING.match(lines[at]):
            return []  # has words of its own
        found.append(lines[at])
        at += 1
    text = "\n".join(found)
    ends = [line for line in found if line.endswith((";", "}"))]
    opens_scope = re.search(r"^\s*(class|struct|enum|namespace)\b", text, re.M)
    is_list = len(ends) > 1 and text.count("{") == text.count("}") and not opens_scope
    return found if is_list else []


def filtered(lines):
    out, at, first = [], 0, True
    while at < len(lines):
        if not COMMENT.match(lines[at]):
            trailing = TRAILING.match(lines[at])
            if not trailing:
                # Where a template is compiled is nobody's contract.
                out.append("" if lines[at].startswith("extern template") else lines[at])
                at += 1
                continue
            # A comment at a line's end may go on in lines of its own, in the same column.
            column, words = lines[at].index("// ", len(trailing[1])), [trailing[2]]
            while at + 1 < len(lines) and re.match(rf"^ {{{column}}}// ", lines[at + 1]):
                at += 1
                words.append(lines[at].strip()[3:])
            out.append(f"{trailing[1]}  ///< {escaped(' '.join(words))}")
            at += 1
            continue
        indent, texts = COMMENT.match(lines[at])[1], []
        while at < len(lines) and COMMENT.match(lines[at]):
            texts.append(COMMENT.match(lines[at])[2] or "")
            at += 1
        # What is followed by an empty line belongs to no declaration.
        alone = at < len(lines) and EMPTY.match(lines[at]) and not first
        shared = [] if first or alone else paragraph(lines, at)
        if alone:
            words = [f"{indent}// {text}" for text in texts]
        else:
            words = (["/// @file"] if first else []) + block(indent, texts)
        out += [f"{indent}///@{{"] + words + shared + [f"{indent}///@}}"] if shared else words
        at += len(shared)
        first = False
    return out


if __name__ == "__main__":
    print("\n".join(filtered(open(sys.argv[1], encoding="utf-8").read().split("\n"))), end="")
