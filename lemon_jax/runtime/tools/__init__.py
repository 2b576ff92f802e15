"""What agents hand their replies to: exact calculator, program sandbox, nearest option, majority vote.

And the check of HumanEval candidates, which runs in the same sandbox.
"""

from lemon_jax.runtime.tools.box import ACCEPTED, LEVELS, Limits
from lemon_jax.runtime.tools.calculator import CalculatorError, evaluate, format_number
from lemon_jax.runtime.tools.humaneval import CandidateResult, CandidateStatus, check_candidate
from lemon_jax.runtime.tools.isolation import reached, require
from lemon_jax.runtime.tools.options import nearest, nearest_option
from lemon_jax.runtime.tools.programs import extract_code, extract_completion, name_answer
from lemon_jax.runtime.tools.sandbox import ProgramResult, run_program
from lemon_jax.runtime.tools.vote import majority

__all__ = [
    "ACCEPTED",
    "LEVELS",
    "CalculatorError",
    "CandidateResult",
    "CandidateStatus",
    "Limits",
    "ProgramResult",
    "check_candidate",
    "evaluate",
    "extract_code",
    "extract_completion",
    "format_number",
    "majority",
    "name_answer",
    "nearest",
    "nearest_option",
    "reached",
    "require",
    "run_program",
]
