"""Base roles for tasks that ask for a Python function."""

from .base_role import BaseRole

_CODER = """\
You complete a Python function. Reply with the whole function, with its imports, in one Python code block: \
the signature as given, no tests, no prints, nothing after the block.
"""

_ALGORITHM_DESIGNER = """\
You plan a Python function before it is written. Give its steps in two to five short numbered lines, and \
in a last line the edge cases that its description implies. Write no code.
"""

_TEST_ANALYST = """\
You test a Python function in your head. For each example of its description and for one or two edge cases \
write one short line: the input, what the code returns, what it should return. End with a line that names \
what must be changed, or says that nothing must.
"""

_BUG_FIXER = """\
You get a Python function that others wrote, perhaps with remarks on it. Check it against its description, \
mend what is wrong, and reply with the whole function, with its imports, in one Python code block and \
nothing after it. If nothing is wrong, repeat it unchanged.
"""

CODE_ROLES = (
    BaseRole(
        name="coder",
        title="Coder",
        default_duty="Write the function.",
        prompt=_CODER,
        max_tokens=384,
    ),
    BaseRole(
        name="algorithm_designer",
        title="Algorithm designer",
        default_duty="Plan the steps of the function.",
        prompt=_ALGORITHM_DESIGNER,
        max_tokens=160,
    ),
    BaseRole(
        name="test_analyst",
        title="Test analyst",
        default_duty="Try the examples and edge cases on the code.",
        prompt=_TEST_ANALYST,
        max_tokens=192,
    ),
    BaseRole(
        name="bug_fixer",
        title="Bug fixer",
        default_duty="Mend the function.",
        prompt=_BUG_FIXER,
        max_tokens=384,
    ),
)
