"""Small mends for LLM-written programs before they run."""

from __future__ import annotations

import ast
import re
import textwrap
import warnings

MAX_CODE = 65_536  # bytes; what is longer is neither parsed nor run
_FILE = "<worker>"  # the file name that parsing is told
# "```python", or with attributes: "```python title=a.py {1,3}"
_TAG_LINE = re.compile(
    r"[ \t]*(?:([\w+.-]+)(?:[ \t]+(?:[\w-]+=\S+|\{[^\n{}]*\}))*)?[ \t]*(?:\r?\n|$)(.*)", re.DOTALL
)
# A line that opens or closes a block: backticks or tildes, three or more, and what the block is called.
_FENCE_LINE = re.compile(r"^([ \t]*)(`{3,}|~{3,})[ \t]*([^`\n]*?)[ \t\r]*$", re.MULTILINE)
_TAG_INLINE = re.compile(r"[ \t]*(python3?|py)\s+(.*)", re.DOTALL | re.IGNORECASE)


def extract_code(text: str) -> str:
    """The program in a worker's reply: the last complete fenced block, or the text itself.

    Blocks marked as another language ("output", "text") count only if there is no other. Without a
    closing fence: the rest after the opening one, or, when nothing follows it, what stands before it.
    """
    text = _plain_fences(text.lstrip("\ufeff"))
    before, blocks = _fenced(text)
    if before is None:
        return textwrap.dedent(text).strip()
    candidates = _complete(blocks) or [body for _, body, _ in blocks] or [before]
    return textwrap.dedent(candidates[-1]).strip()


def extract_completion(text: str, entry_point: str) -> str:
    """The code in a reply to a HumanEval prompt, with its indentation: a function, or a function's body.

    Of several blocks the last that defines `entry_point`, otherwise as `extract_code`; text that stands
    before a lone closing fence is the body that a model went on with.
    """
    text = text.lstrip("\ufeff")
    defines = re.compile(rf"^[ \t]*(?:async[ \t]+)?def[ \t]+{re.escape(entry_point)}\b", re.MULTILINE)
    # Fences may stand in a docstring: a text, or a block by the rules of CommonMark, that is a program
    # as it stands needs no guess about them.
    for body in reversed([text, *_fenced_lines(text)]):
        if defines.search(body) and _parsed(textwrap.dedent(body)):
            return body.strip("\r\n")
    text = _plain_fences(text)
    before, blocks = _fenced(text)
    if before is None:
        return text.strip("\r\n")
    goes_on = [before] if before.strip() and before.lstrip("\r\n")[0] in " \t" else []
    every = [before, *(body for _, body, _ in blocks)]
    candidates = [body for body in every if defines.search(body)] or _complete(blocks) or goes_on
    return (candidates or [body for _, body, _ in blocks] or [before])[-1].strip("\r\n")


def _fenced_lines(text: str) -> list[str]:
    """The blocks whose fences are lines of their own (CommonMark 0.31, 4.5, closed ones only).

    A closing fence is of the same character, at least as long, without a name, and no deeper than its
    opening one: a fence within a docstring is deeper.
    """
    blocks: list[str] = []
    opened: re.Match[str] | None = None
    for line in _FENCE_LINE.finditer(text):
        if opened is None:
            opened = line
        elif (
            line[2].startswith(opened[2])
            and not line[3]
            and len(line[1].expandtabs()) <= len(opened[1].expandtabs())
        ):
            blocks.append(text[opened.end() + 1 : line.start()])
            opened = None
    return blocks


def _plain_fences(text: str) -> str:
    """Fence lines of tildes, of more than three backticks, or with a name in braces, as plain ones."""

    def plain(line: re.Match[str]) -> str:
        name = re.sub(r"^\{ ?\.?([\w+-]*)[^}]*\}$", r"\1", line[3])
        return f"{line[1]}```{name}"

    return _FENCE_LINE.sub(plain, text)


def _parsed(code: str) -> ast.Module | None:
    """The tree of a program; None where it is too long or has none. Warnings about it are for nobody here."""
    if len(code.encode("utf-8", "replace")) > MAX_CODE:
        return None
    with warnings.catch_warnings():
        # Filters are the whole process's: what another thread might keep of this one silences nothing else.
        warnings.filterwarnings("ignore", module=_FILE)
        try:
            return ast.parse(code, _FILE)
        except (SyntaxError, ValueError, RecursionError, MemoryError):
            return None


def _fenced(text: str) -> tuple[str | None, list[tuple[str, str, bool]]]:
    """What stands before the first fence, None without any; then (label, text, closed) of each block."""
    parts = text.split("```")
    blocks = []
    for index in range(1, len(parts), 2):
        match = _TAG_LINE.match(parts[index]) or _TAG_INLINE.match(parts[index])
        label, body = ((match[1] or "").lower(), match[2]) if match else ("", parts[index])
        if body.strip():
            blocks.append((label, body, index + 1 < len(parts)))
    return (parts[0] if len(parts) > 1 else None), blocks


def _complete(blocks: list[tuple[str, str, bool]]) -> list[str]:
    complete = [(label, body) for label, body, closed in blocks if closed]
    ours = [body for label, body in complete if label in ("", "python", "python3", "py")]
    return ours or [body for _, body in complete]


def name_answer(code: str) -> str:
    """Let a program without `answer` answer with the last value it computes.

    Small models often stop one line early.

    In:  "rate = 1 / 12\\ndays = 1 / rate"
    Out: "rate = 1 / 12\\ndays = 1 / rate\\nanswer = days"

    Code that sets `answer`, does not parse, is longer than MAX_CODE, or ends in neither an assignment nor
    an expression is returned as it is.
    """
    tree = _parsed(code)
    if not tree or not tree.body or any(isinstance(n, ast.Name) and n.id == "answer" for n in ast.walk(tree)):
        return code
    last = tree.body[-1]
    if isinstance(last, ast.Assign) and isinstance(last.targets[-1], ast.Name):
        return f"{code.rstrip()}\nanswer = {last.targets[-1].id}"
    if isinstance(last, ast.Expr) and not isinstance(last.value, ast.Call):
        # An expression may span lines: cut it out of the source by its own position.
        segment = ast.get_source_segment(code, last.value)
        return f"{code.rstrip()}\nanswer = ({segment})" if segment else code
    return code
