"""The mixture that the benchmark of the workers asks."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "experiments" / "bench"))

from workers import requests

from lemon_jax.runtime.prompts import fixed_prefix


def test_the_mixture_is_what_the_benchmark_says_and_the_same_every_time():
    asked = requests(64, 0)
    assert asked == requests(64, 0)
    assert asked != requests(64, 1)
    assert len(requests(3, 0)) == 3
    systems = [request.messages[0].content for request in asked]
    assert sum(system.startswith(fixed_prefix("equation_writer")) for system in systems) == 32
    assert all(16 <= request.max_tokens <= 200 for request in asked)
    assert len({request.messages[1].content for request in asked}) == 64
    # About 3.2 characters a token.
    sizes = [sum(len(message.content) for message in request.messages) for request in asked]
    assert 150 < min(sizes) < 700
    assert 1900 < max(sizes) < 2300
