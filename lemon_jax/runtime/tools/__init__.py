"""What agents hand their replies to: exact calculator, program sandbox, nearest option, majority vote."""

from lemon_jax.runtime.tools.box import Limits
from lemon_jax.runtime.tools.calculator import CalculatorError, evaluate, format_number
from lemon_jax.runtime.tools.options import nearest, nearest_option
from lemon_jax.runtime.tools.programs import extract_code, name_answer
from lemon_jax.runtime.tools.sandbox import ProgramResult, run_program
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
