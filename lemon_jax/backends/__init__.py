"""Who answers an agent's prompt: servers, embedded models, simulated workers, and a scripted double."""

from lemon_jax.backends.download import resolve_model
from lemon_jax.backends.embedded import EmbeddedBackend, EmbeddedServer
from lemon_jax.backends.gate import ExclusiveGate
from lemon_jax.backends.gguf_header import GgufHeader, read_gguf_header
from lemon_jax.backends.llama_server import PROGRAM_VARIABLE
from lemon_jax.backends.model_files import PRESETS, ModelFile, Progress, file_digest, model_cache
from lemon_jax.backends.openai import OpenAIBackend
from lemon_jax.backends.pool import WorkerPool
from lemon_jax.backends.replay import MissingCall, ReplayBackend, replay_workers
from lemon_jax.backends.scripted import ScriptedBackend, pseudo_worker
from lemon_jax.backends.simulated import RoleForm, SealedTask, SimulatedBackend, World
from lemon_jax.backends.types import Backend, Finish, Message, Reply, Request
from lemon_jax.backends.workers import (
    CapacityConfig,
    CostRates,
    ModelConfig,
    WorkerConfig,
    load_worker_file,
    parse_worker_file,
    worker_config,
)

__all__ = [
    "PRESETS",
    "PROGRAM_VARIABLE",
    "Backend",
    "CapacityConfig",
    "CostRates",
    "EmbeddedBackend",
    "EmbeddedServer",
    "ExclusiveGate",
    "Finish",
    "GgufHeader",
    "Message",
    "MissingCall",
    "ModelConfig",
    "ModelFile",
    "OpenAIBackend",
    "Progress",
    "ReplayBackend",
    "Reply",
    "Request",
    "RoleForm",
    "ScriptedBackend",
    "SealedTask",
    "SimulatedBackend",
    "WorkerConfig",
    "WorkerPool",
    "World",
    "file_digest",
    "load_worker_file",
    "model_cache",
    "parse_worker_file",
    "pseudo_worker",
    "read_gguf_header",
    "replay_workers",
    "resolve_model",
    "worker_config",
]
