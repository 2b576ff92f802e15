from __future__ import annotations

from collections.abc import Iterator

import pytest
from attack_runner import no_survivors
from sandbox_helpers import LEVELS, run

from lemon_jax.runtime.tools import box


@pytest.fixture(params=list(LEVELS))
def level(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr(box, "LAYERS", LEVELS[request.param])
    if run("answer = 1", allow=True).isolation != request.param:
        pytest.skip(f"this machine does not allow {request.param}")
    return str(request.param)


@pytest.fixture
def nothing_left_behind() -> Iterator[None]:
    with no_survivors():
        yield
