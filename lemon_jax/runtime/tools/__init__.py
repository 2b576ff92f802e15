"""What agents hand their replies to: exact calculator, program sandbox, nearest option, majority vote."""

from lemon_jax.runtime.tools.calculator import CalculatorError, evaluate, format_number
from lemon_jax.runtime.tools.options import nearest, nearest_option
from lemon_jax.runtime.tools.programs import name_answer
from lemon_jax.runtime.tools.sandbox import Limits, ProgramResult, extract_code, run_program
from lemon_jax.runtime.tools.vote import majority

__all__ = [
    "CalculatorError",
    "Limits",
    "ProgramResult",
    "evaluate",
    "extract_code",
    "format_number",
    "majority",
    "name_answer",
    "nearest",
    "nearest_option",
    "run_program",
]
