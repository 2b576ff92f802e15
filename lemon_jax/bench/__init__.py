"""Problems, the answers found in replies, and whether they are right."""

from lemon_jax.bench.data import OFFICIAL_URL, SOURCES, Dataset, load
from lemon_jax.bench.extract import Extraction, Grade, extract_choice, extract_number, grade, numbers_in
from lemon_jax.bench.sample import generate
from lemon_jax.bench.stats import mcnemar_exact, paired_bootstrap, wilson
from lemon_jax.bench.task import LETTERS, Kind, Task

__all__ = [
    "LETTERS",
    "OFFICIAL_URL",
    "SOURCES",
    "Dataset",
    "Extraction",
    "Grade",
    "Kind",
    "Task",
    "extract_choice",
    "extract_number",
    "generate",
    "grade",
    "load",
    "mcnemar_exact",
    "numbers_in",
    "paired_bootstrap",
    "wilson",
]
