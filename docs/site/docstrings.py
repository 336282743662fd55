"""Docstrings in this project's style as Markdown: rows of aligned columns become definition lists.

    name     text that goes on
             in further lines

Names are arguments, attributes, or words such as Returns and Raises; a long one has a line of its own. Indented lines
that follow no row are code.
"""

from __future__ import annotations

import ast
import re
import textwrap
from typing import Any

import griffe

_NAME = r"[\w.*\"']+(?:, [\w.*\"']+)*"
_ROW = re.compile(rf"({_NAME}) {{2,}}(\S.*)")
_HEADINGS = {"Returns", "Raises", "Changes", "Source", "Yields"}
_LINKED = "cache_clear|cache_info|explain|instances|load|optimize|profile|quantize|replace_forward|save|show_config"
_MARKUP = re.compile(rf"(``.+?``|`[^`]+`|(?<![\w.])(?:{_LINKED})\(\))")  # the only markup in a docstring


class Docstrings(griffe.Extension):
    """Rewrites each docstring once its package is read."""

    def on_object(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        if obj.docstring is not None:
            obj.docstring.value = markdown(obj.docstring.value)


def markdown(text: str) -> str:
    """Return a docstring as Markdown."""
    blocks = [_block(block.splitlines()) for block in re.split(r"\n\s*\n", text)]
    return "\n\n".join(blocks)


def _block(lines: list[str]) -> str:
    """One paragraph: text, code, rows, one after another."""
    column = _column(lines)
    parts: list[tuple[str, list[str]]] = []
    for number, line in enumerate(lines):
        row = _row(line, column)
        if row is None and column is not None and re.fullmatch(_NAME, line) and _is_text(lines[number + 1 :], column):
            row = (line, "")
        if row is not None:
            parts.append(("row", list(row)))
        elif line.startswith(" ") and parts and parts[-1][0] == "row":
            parts[-1][1].append(line.strip())
        else:
            kind = "code" if line.startswith("    ") else "text"
            if not parts or parts[-1][0] != kind:
                parts.append((kind, []))
            parts[-1][1].append(line)
    return "\n\n".join(_written(kind, found) for kind, found in parts)


def _column(lines: list[str]) -> int | None:
    """Where the second column begins: as most rows of two spaces say."""
    starts = [match.start(2) for line in lines if (match := _ROW.fullmatch(line))]
    return max(set(starts), key=starts.count) if starts else None


def _row(line: str, column: int | None) -> tuple[str, str] | None:
    """Name and text of a row; a name as long as its column is followed by one space."""
    match = _ROW.fullmatch(line)
    if match:
        return match[1], match[2]
    if column is None or len(line) <= column or line[column - 1] != " " or line[column] == " ":
        return None
    name = line[:column].rstrip()
    return (name, line[column:]) if re.fullmatch(_NAME, name) else None


def _is_text(following: list[str], column: int) -> bool:
    """Whether the next line is in the second column: that of a name too long for its own."""
    return bool(following) and following[0].startswith(" " * column) and following[0][column : column + 1].strip() != ""


def _written(kind: str, lines: list[str]) -> str:
    if kind == "code":
        code = textwrap.dedent("\n".join(lines))
        return f"```{'python' if _is_python(code) else 'text'}\n{code}\n```"
    if kind == "text":
        return escaped(" ".join(line.strip() for line in lines))
    name = f"**{lines[0]}**" if lines[0] in _HEADINGS else f"`{lines[0]}`"
    return f"{name}\n:   {escaped(' '.join(filter(None, lines[1:])))}"


def _is_python(code: str) -> bool:
    try:
        ast.parse(code)
    except SyntaxError:
        return False
    return True


def escaped(text: str) -> str:
    """Plain text as Markdown: nothing in it is markup but `code`, and calls of what the package exports are links."""
    parts = _MARKUP.split(text)
    return "".join(_marked(part) if number % 2 else _plain(part) for number, part in enumerate(parts))


def _marked(part: str) -> str:
    return part if part.startswith("`") else f"[{part}][zendnn_cffi.{part.removesuffix('()')}]"


def _plain(part: str) -> str:
    return re.sub(r"([\\*_\[\]<>|#])", r"\\\1", part)
