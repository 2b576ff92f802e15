"""Executing specs: prompts, the asynchronous executor, tools, and the store of worker calls."""

from lemon_jax.runtime.calls import Call, Caller
from lemon_jax.runtime.execution import AgentRun, Execution, Status, Usage, call_cost
from lemon_jax.runtime.executor import Executor, Extract
from lemon_jax.runtime.prompts import (
    Input,
    Problem,
    TextProblem,
    build_messages,
    fixed_prefix,
    render_options,
)
from lemon_jax.runtime.repeats import places_of_sample, repeat_indices
from lemon_jax.runtime.store import CallStore, call_key, read_recording, write_recording

__all__ = [
    "AgentRun",
    "Call",
    "CallStore",
    "Caller",
    "Execution",
    "Executor",
    "Extract",
    "Input",
    "Problem",
    "Status",
    "TextProblem",
    "Usage",
    "build_messages",
    "call_cost",
    "call_key",
    "fixed_prefix",
    "places_of_sample",
    "read_recording",
    "render_options",
    "repeat_indices",
    "write_recording",
]
