"""Small mends for LLM-written programs before they run."""

from __future__ import annotations

import ast


def name_answer(code: str) -> str:
    """Let a program without `answer` answer with the last value it computes.

    Small models often stop one line early.

    In:  "rate = 1 / 12\\ndays = 1 / rate"
    Out: "rate = 1 / 12\\ndays = 1 / rate\\nanswer = days"

    Code that sets `answer`, does not parse, or ends in neither an assignment nor an expression is
    returned as it is.
    """
    try:
        tree = ast.parse(code)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return code
    if not tree.body or any(isinstance(n, ast.Name) and n.id == "answer" for n in ast.walk(tree)):
        return code
    last = tree.body[-1]
    if isinstance(last, ast.Assign) and isinstance(last.targets[-1], ast.Name):
        return f"{code.rstrip()}\nanswer = {last.targets[-1].id}"
    if isinstance(last, ast.Expr) and not isinstance(last.value, ast.Call):
        # An expression may span lines: cut it out of the source by its own position.
        segment = ast.get_source_segment(code, last.value)
        return f"{code.rstrip()}\nanswer = ({segment})" if segment else code
    return code
