"""LEMON in JAX: an orchestrator that learns to write executable multi-agent specs."""

__version__ = "0.1.0"
