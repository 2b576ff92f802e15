"""A completion as the source of a module: what models send is not always the body they were asked for.

Compiling is left to the process that will run it, without rights: a hostile text can crash a compiler.
So this module is loaded there, and imports nothing. Outside only `programs.py` parses, short texts, to find
where a program begins and ends; that makes no code of them.
"""

_TREE_ONLY = 0x400  # ast.PyCF_ONLY_AST, without loading `ast`
_DEFINITIONS = ("FunctionDef", "AsyncFunctionDef", "ClassDef")


def prelude(prompt, entry_point):
    """What stands before the function to be completed: imports and helper functions. May be empty.

    In:  "import math\\n\\ndef f(x):\\n    ...", "f"
    Out: "import math\\n\\n"
    """
    found = _entry_node(prompt, entry_point)
    if found is None:
        return ""
    lines = prompt.split("\n")  # as the compiler counts them; splitlines would also break at \f
    first = min([found.lineno, *(d.lineno for d in found.decorator_list)])
    return "".join(line + "\n" for line in lines[: first - 1])


def sources(prompt, entry_point, completion):
    """The texts to execute, one after the other, in one namespace.

    A module of its own (it defines something at its outermost level) follows the prompt's imports and
    helpers; anything else is the function's body and continues the prompt, with its indentation mended
    where that makes it compile. What compiles in no way is returned as it would be run, for its error.
    """
    flat = dedent(completion)
    names, defines = _outermost(flat)
    as_module = [prelude(prompt, entry_point), flat]
    if entry_point in names:
        return as_module
    bodies = list(_bodies(prompt, entry_point, completion, flat))
    if defines and completion == flat:
        return as_module  # another function's definition, or a class around it: no body
    for body in bodies:
        if compiles(body):
            return [body]
    return as_module if defines or f"def {entry_point}" in flat else bodies[:1]


def _bodies(prompt, entry_point, completion, flat):
    found = _entry_node(prompt, entry_point)
    margin = " " * (found.body[0].col_offset if found else 4)
    if prompt.rpartition("\n")[2].strip():
        prompt += "\n"
    yield prompt + completion
    prompt = prompt.rstrip(" ")
    for body in mended(completion, flat, margin):
        yield prompt + body


def mended(completion, flat, margin):
    """A body with its margin restored, in each of the ways in which it may have been lost."""
    yield indent(flat, margin)
    # The first line may have lost its margin when somebody stripped the text.
    first, _, rest = completion.lstrip().partition("\n")
    yield f"{margin}{first}\n{rest}"
    yield f"{margin}{first}\n{indent(dedent(rest), margin)}"


def _entry_node(prompt, entry_point):
    for text in (prompt, prompt + "\n    pass\n"):  # a body that is only a comment needs a statement
        try:
            tree = compile(text, "<prompt>", "exec", _TREE_ONLY)
        except (SyntaxError, ValueError):
            continue
        found = [n for n in tree.body if type(n).__name__ in _DEFINITIONS and n.name == entry_point]
        if found:
            return found[-1]
    return None


def _outermost(text):
    """Names that a module binds at its outermost level; whether it defines anything. Empty if it is none."""
    if not compiles(text):  # "return" outside a function is refused here, and not by the parser alone
        return set(), False
    body = compile(text, "<completion>", "exec", _TREE_ONLY).body
    names = set()
    for node in body:
        kind = type(node).__name__
        if kind in _DEFINITIONS:
            names.add(node.name)
        elif kind in ("Assign", "AnnAssign"):
            targets = node.targets if kind == "Assign" else [node.target]
            names |= {target.id for target in targets if type(target).__name__ == "Name"}
    return names, any(type(node).__name__ in _DEFINITIONS for node in body)


def compiles(text):
    try:
        compile(text, "<completion>", "exec")
    except (SyntaxError, ValueError, RecursionError, MemoryError, OverflowError):
        return False
    return True


def dedent(text):
    """As textwrap.dedent, which takes five milliseconds to load."""
    lines = text.split("\n")
    margins = [line[: len(line) - len(line.lstrip(" \t"))] for line in lines if line.strip()]
    shared = 0
    while margins and shared < min(map(len, margins)) and len({m[shared] for m in margins}) == 1:
        shared += 1
    return "\n".join(line[shared:] if line.strip() else "" for line in lines)


def indent(text, margin):
    return "\n".join(margin + line if line.strip() else line for line in text.split("\n"))
