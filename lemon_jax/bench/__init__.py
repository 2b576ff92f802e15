"""Problems, the answers found in replies, and whether they are right."""

from lemon_jax.bench.data import OFFICIAL_URL, Dataset, load
from lemon_jax.bench.extract import Extraction, extract_choice, extract_number, numbers_in
from lemon_jax.bench.grade import EXTRACTORS, Grade, grade
from lemon_jax.bench.sample import generate
from lemon_jax.bench.sources import PROTOCOLS, SOURCES
from lemon_jax.bench.stats import mcnemar_exact, paired_bootstrap, wilson
from lemon_jax.bench.task import LETTERS, Kind, Prices, Task

__all__ = [
    "EXTRACTORS",
    "LETTERS",
    "OFFICIAL_URL",
    "PROTOCOLS",
    "SOURCES",
    "Dataset",
    "Extraction",
    "Grade",
    "Kind",
    "Prices",
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
