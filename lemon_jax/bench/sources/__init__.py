"""Which benchmarks there are, and which of their problems a protocol trains on and scores.

- `full`: our splits; the widest test set that leaves a train split.
- `lemon`: the test sets of LEMON's results table.
- `gdesigner`: the sets of the family of systems that G-Designer began (AgentDropout, ARG-Designer, OFA-MAS
  and others), read from their public code: 40 problems of the test file are trained on, the others scored.
"""

from typing import get_args

from lemon_jax.bench.sources.aqua import AQUA
from lemon_jax.bench.sources.gsm8k import GSM8K
from lemon_jax.bench.sources.humaneval import HUMANEVAL
from lemon_jax.bench.sources.mmlu import MMLU
from lemon_jax.bench.sources.multiarith import MULTIARITH
from lemon_jax.bench.sources.source import DataFile, Protocol, Rows, Source, read_rows
from lemon_jax.bench.sources.svamp import SVAMP
from lemon_jax.errors import LemonError

__all__ = ["PROTOCOLS", "SOURCES", "DataFile", "Protocol", "Rows", "Source", "find_source", "read_rows"]

_BENCHES = {
    "aqua": AQUA,
    "multiarith": MULTIARITH,
    "gsm8k": GSM8K,
    "svamp": SVAMP,
    "mmlu": MMLU,
    "humaneval": HUMANEVAL,
}
PROTOCOLS: dict[Protocol, dict[str, Source]] = {
    protocol: {bench: by_protocol[protocol] for bench, by_protocol in _BENCHES.items()}
    for protocol in get_args(Protocol)
}
SOURCES = PROTOCOLS["full"]


def find_source(bench: str, protocol: str = "full") -> Source:
    """The source of a bench under a protocol.

    Raises:
        LemonError: either name is unknown.
    """
    if protocol not in PROTOCOLS:
        raise LemonError(f"protocol {protocol!r} is unknown, expected one of: {', '.join(PROTOCOLS)}")
    if bench not in SOURCES:
        raise LemonError(f"bench {bench!r} is unknown, expected one of: {', '.join(SOURCES)}")
    return PROTOCOLS[protocol][bench]
