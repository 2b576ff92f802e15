"""What the readers of untrusted input promise, as functions that raise AssertionError where it does not hold.

Each takes bytes, of any kind, and reads them as one of the project's readers would. A LemonError is a
proper refusal; any other exception is a fault. `experiments/fuzz.py` drives them by coverage, the tests by
hypothesis.
"""

from __future__ import annotations

import ast
import json
import struct
import tempfile
import unicodedata
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any

import yaml

from lemon_jax.backends import WorkerConfig, load_worker_file, parse_worker_file, read_gguf_header
from lemon_jax.bench import LETTERS, extract_choice, extract_number
from lemon_jax.errors import LemonError
from lemon_jax.numbers import format_number, parse_number
from lemon_jax.spec import Parsed, applicable, baselines, dump, format_issue, order, parse

# As the reader chooses it: the two disagree on a tab within a plain scalar.
_LOADER: Any = getattr(yaml, "CBaseLoader", yaml.BaseLoader)
ROOT = Path(__file__).resolve().parent.parent


@dataclass(frozen=True, kw_only=True)
class Target:
    """A reader under test: `check` one input, `seeds` to begin with, the modules whose coverage counts."""

    check: Callable[[bytes], None]
    seeds: Callable[[], list[bytes]]
    modules: tuple[str, ...]
    words: tuple[str, ...] = ()  # of its language, for the mutations
    longest: int = 4096  # bytes of an input


def check_spec(data: bytes) -> None:
    """`parse` gives two verdicts that agree with each other, with `dump`, and with its spans."""
    check_spec_text(data.decode("utf-8", "replace"))


def check_spec_text(text: str) -> None:
    """`check_spec` of a text."""
    parsed = parse(text)
    assert parsed.strict_ok == (not parsed.issues)
    lines = text.split("\n")
    for issue in parsed.issues:
        assert 1 <= issue.line <= len(lines), issue
        assert 1 <= issue.col <= len(lines[issue.line - 1]) + 1, issue
        assert "\n" not in format_issue(issue, "spec")
    if parsed.spec is None:
        assert not parsed.strict_ok
        assert (parsed.spans, parsed.text) == ({}, text)
        return
    canonical = dump(parsed.spec)
    if parsed.strict_ok:
        assert (parsed.text, parsed.repairs) == (text, ())
        _check_edits(parsed)
    else:
        assert parsed.repairs
        assert parsed.text == canonical
    _check_spans(parsed)
    again = parse(canonical)
    assert again.spec == parsed.spec
    # An odd id is told apart by what it is, so it is kept, and named again.
    kept = {issue.code for issue in again.issues} == {"E_ID_FORMAT"} and "keep_id" in parsed.repairs
    assert again.strict_ok or kept, again.issues
    assert again.spec is not None
    assert dump(again.spec) == canonical
    _check_spans(again)
    assert sorted(order(parsed.spec)) == sorted(agent.id for agent in parsed.spec.agents)


def _check_spans(parsed: Parsed) -> None:
    """Every span, cut out of the text and read alone, is the value of its field."""
    assert parsed.spec is not None
    fields: dict[tuple[str | int, ...], str] = {("version",): "1", ("output",): parsed.spec.output}
    written = {agent.id: i for i, agent in enumerate(parsed.spec.agents)}
    ids: dict[str | int, str] = {}
    for path, (start, end) in parsed.spans.items():
        assert 0 <= start <= end <= len(parsed.text)
        if len(path) == 3 and path[2] == "id":
            ids[path[1]] = _nfc(_scalar(parsed.text[start:end]))
    for place, agent_id in ids.items():
        agent = parsed.spec.agents[written[agent_id]]
        for key in ("id", "name", "role", "duty", "capacity"):
            fields["agents", place, key] = getattr(agent, key)
        for j, parent in enumerate(agent.depends_on):
            fields["agents", place, "depends_on", j] = parent
    assert len(ids) == len(parsed.spec.agents)
    for path, value in fields.items():
        start, end = parsed.spans[path]
        source = parsed.text[start:end]
        if source[:1] in ("|", ">"):  # its indentation is that of the lines before it
            continue
        # Prose is kept as it is; words that look alike are alike.
        found = _scalar(source) if path[-1] in ("name", "duty") else _nfc(_scalar(source))
        assert found == value, path


def _scalar(source: str) -> str:
    if source[:1] == '"':
        return str(yaml.load(source, _LOADER))
    node = yaml.compose(source, _LOADER)
    return str(node.value) if isinstance(node, yaml.ScalarNode) else source


def _nfc(text: str) -> str:
    return unicodedata.normalize("NFC", text)


def _check_edits(parsed: Parsed) -> None:
    for edit in applicable(parsed):
        (a, b), (c, d) = edit.span, edit.edited_span
        assert parsed.text[:a] == edit.text[:c]
        assert parsed.text[b:] == edit.text[d:]
        assert parse(edit.text).strict_ok
        assert parse(edit.text).spec == edit.spec


def check_extract(data: bytes) -> None:
    """An answer read off a reply is a canonical number, or one of the letters there are."""
    text = data.decode("utf-8", "replace")
    number = extract_number(text)
    assert number.fallback <= (number.value is not None)
    if number.value is not None:
        value = Fraction(number.value)
        assert format_number(value) == number.value
        # "1e91" is a number that, written out, is too long to be read as one.
        assert len(number.value) > 18 or parse_number(number.value) == value
    for n_options in (0, 2, 5, 26):
        choice = extract_choice(text, n_options)
        assert choice.value is None or choice.value in LETTERS[:n_options]
        assert choice.fallback <= (choice.value is not None)


def check_workers(data: bytes) -> None:
    """A worker file is a sound configuration, or is refused in one line."""
    with _file(data, "w.toml") as path:
        config = _refused(lambda: load_worker_file(path), str(path))
    if config is None:
        return
    assert isinstance(config, WorkerConfig)
    for capacity in config.capacities.values():
        model = config.models[capacity.model]
        assert 0 <= capacity.price <= 1e12
        assert model.slots >= 1
        if model.backend == "embedded":
            assert (model.path is None) != (model.preset is None)
    assert set(config.capacities) == {"small", "medium", "large"}
    assert config == parse_worker_file(data.decode(), source=str(path), folder=path.parent)


def check_gguf(data: bytes) -> None:
    """A GGUF header is read, or the file is refused in one line."""
    with _file(data, "m.gguf") as path:
        header = _refused(lambda: read_gguf_header(path), str(path))
    if header is not None:
        assert data.startswith(b"GGUF")
        assert header.version in (2, 3)
        assert 0 < header.tensors <= 65536


def check_gguf_model(data: bytes) -> None:
    """A GGUF model becomes a decoder of the sizes it says, or is refused in one line."""
    from lemon_jax.model import load_pretrained, named_params

    with _file(data, "m.gguf") as path:
        loaded = _refused(lambda: load_pretrained(path), str(path))
    if loaded is not None:
        decoder, config = loaded
        params = named_params(decoder)
        assert params["embed"].shape == (config.vocab_size, config.embed_dim)
        # The smallest quantisation takes 1.5 bits a number or more.
        assert sum(value.size for value in params.values()) <= 6 * len(data)


def check_safetensors(data: bytes) -> None:
    """A weights file is loaded, or refused in one line; so is its metadata."""
    from lemon_jax.model import load_weights, named_params, read_metadata

    with _file(data, "w.safetensors") as path:
        metadata = _refused(lambda: read_metadata(path), str(path))
        loaded = _refused(lambda: load_weights(path), str(path))
    assert metadata is None or isinstance(metadata, dict)
    if loaded is not None:
        assert metadata is not None
        decoder, config = loaded
        sizes = sum(value.size for value in named_params(decoder).values())
        assert 0 < sizes <= len(data) // 2
        assert config.num_layers <= len(data)


def _refused(read: Callable[[], Any], path: str) -> Any:
    """What `read` returns, or None where it refuses: in one line that names the file and is not endless."""
    try:
        return read()
    except LemonError as error:
        message = str(error)
        assert "\n" not in message
        assert message.startswith(path)
        assert len(message) < 20_000
        return None


class _file:
    """Context manager: a file of that name with these bytes, in memory where there is such a place."""

    folder: tempfile.TemporaryDirectory[str] | None = None

    def __init__(self, data: bytes, name: str):
        if _file.folder is None:
            shared = Path("/dev/shm")
            _file.folder = tempfile.TemporaryDirectory(dir=shared if shared.is_dir() else None)
        self.path = Path(_file.folder.name) / name
        self.path.write_bytes(data)

    def __enter__(self) -> Path:
        return self.path

    def __exit__(self, *_: object) -> None:
        self.path.unlink()


# Seeds


def _literals(folder: str, at_least: int = 12) -> Iterator[str]:
    """The string constants of the tests of a part: what somebody once thought worth trying."""
    for path in sorted((ROOT / "tests" / folder).glob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and len(node.value) >= at_least:
                yield node.value


def _spec_seeds() -> list[bytes]:
    texts = [path.read_text(encoding="utf-8") for path in (ROOT / "experiments" / "specs").glob("*.yaml")]
    texts += [dump(spec) for spec in baselines().values()]
    texts += [f"```yaml\n{texts[0]}```\n", texts[0].replace('"', ""), texts[0].replace("  ", "\t")]
    texts += _literals("spec")
    return [text.encode("utf-8", "surrogatepass") for text in texts]


def _extract_seeds() -> list[bytes]:
    return [text.encode("utf-8", "replace") for text in _literals("bench", at_least=4)]


def _worker_seeds() -> list[bytes]:
    shipped = ROOT / "lemon_jax" / "backends" / "workers"
    texts = [path.read_text(encoding="utf-8") for path in shipped.glob("*.toml")]
    texts += (ROOT / "docs" / "workers.md").read_text(encoding="utf-8").split("```")
    texts += _literals("backends")
    return [text.removeprefix("toml\n").encode("utf-8", "replace") for text in texts]


def _gguf_seeds() -> list[bytes]:
    def text(value: str) -> bytes:
        return struct.pack("<Q", len(value)) + value.encode()

    head = b"GGUF" + struct.pack("<IQQ", 3, 291, 2)
    name = text("general.architecture") + struct.pack("<I", 8) + text("qwen2")
    values = [
        struct.pack("<IQ", 10, 5),
        struct.pack("<I", 8) + text("value"),
        struct.pack("<IIQ", 9, 5, 3) + bytes(12),
        struct.pack("<IIQ", 9, 8, 2) + text("x") + text("yy"),
    ]
    return [head, head + name, *(head + text("a") + value + name for value in values)]


def _gguf_model_seeds() -> list[bytes]:
    import gguf
    import numpy as np

    kinds = gguf.GGMLQuantizationType
    matrices = ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down")
    seeds = []
    for family, kind in (("llama", kinds.F32), ("qwen3", kinds.Q8_0), ("llama", kinds.Q4_0)):
        with _file(b"", "seed.gguf") as path:
            writer = gguf.GGUFWriter(path, family)
            writer.add_block_count(1)
            writer.add_embedding_length(32)
            writer.add_feed_forward_length(32)
            writer.add_head_count(2)
            writer.add_layer_norm_rms_eps(1e-6)
            names = [f"blk.0.{name}.weight" for name in matrices] + ["token_embd.weight"]
            for name in names:
                data = gguf.quantize(np.ones((32, 32), np.float32), kind)
                writer.add_tensor(name, data, raw_dtype=None if kind == kinds.F32 else kind)
            for name in ("output_norm", "blk.0.attn_norm", "blk.0.ffn_norm"):
                writer.add_tensor(f"{name}.weight", np.ones(32, np.float32))
            for name in ("q_norm", "k_norm") if family == "qwen3" else ():
                writer.add_tensor(f"blk.0.attn_{name}.weight", np.ones(16, np.float32))
            writer.write_header_to_file()
            writer.write_kv_data_to_file()
            writer.write_tensors_to_file()
            writer.close()
            seeds.append(path.read_bytes())
    return seeds


def _safetensors_seeds() -> list[bytes]:
    from flax import nnx

    from lemon_jax.model import Decoder, DecoderConfig, save_weights

    sizes = {"vocab_size": 8, "embed_dim": 4, "num_layers": 1, "num_heads": 2, "num_kv_heads": 1}
    config = DecoderConfig(**sizes, head_dim=2, mlp_dim=4)  # type: ignore[arg-type]
    with _file(b"", "seed.safetensors") as path:
        save_weights(path, Decoder(config, rngs=nnx.Rngs(0)), config, metadata={"step": 3})
        whole = path.read_bytes()
    header = json.dumps({"__metadata__": {"lemon_jax": "{}"}}).encode()
    return [whole, struct.pack("<Q", len(header)) + header, whole[: len(whole) // 2]]


TARGETS = {
    "spec": Target(
        check=check_spec,
        seeds=_spec_seeds,
        modules=("lemon_jax.spec",),
        words=(
            *("version: 1", "agents:", "- id: ", "name: ", "role: ", "duty: ", "capacity: ", "depends_on: ["),
            *("output: ", "math_solver", "majority_vote", "small", "LARGE", "a1", "```yaml", "---", "%YAML"),
            *("&a", "*a", "!!str", "<<", "\\ud83d\\ude00", "\u00a0", "\u201c", "\t", "|2-", ">+", "? ", ": "),
            # Runs, of at most 64 bytes each: where a pattern backtracks, they make it slow.
            *(" " * 64, "\t" * 64, "\n" * 64, "\n-" * 32, " \n" * 32, "~" * 64, "```" + " " * 60 + "`"),
        ),
        longest=16_500,
    ),
    "extract": Target(
        check=check_extract,
        seeds=_extract_seeds,
        modules=("lemon_jax.bench.extract", "lemon_jax.numbers"),
        words=(
            *("answer is ", "Answer: ", "####", "\\boxed{", "\\frac{1}{2}", "option ", "(A)", "B)", "and C"),
            *("1,000", "-0.5", "1/3", "10^6", "1e9", "\u00bd", "%", "= ", "\u2212", "two", "**"),
        ),
        longest=16_384,
    ),
    "workers": Target(
        check=check_workers,
        seeds=_worker_seeds,
        modules=("lemon_jax.backends.workers", "lemon_jax.backends.worker_keys", "tomllib"),
        words=(
            *("[models.m]", "[capacities.small]", "[capacities.medium]", "[capacities.large]", "[cost]"),
            *(
                'backend = "openai"',
                'backend = "embedded"',
                "base_url",
                "api_key_env",
                "price = 1",
                "samples",
            ),
            *("path = ", "~x/", "preset", "slots = ", "0xffff", "nan", "inf", "temperature = 0.5", "a.b.c"),
        ),
    ),
    "gguf": Target(check=check_gguf, seeds=_gguf_seeds, modules=("lemon_jax.backends.gguf_header",)),
    "gguf_model": Target(
        check=check_gguf_model,
        seeds=_gguf_model_seeds,
        modules=(
            "lemon_jax.model.gguf_file",
            "lemon_jax.model.gguf_weights",
            "lemon_jax.model.config_values",
        ),
        words=(
            "general.alignment",
            "rope_freqs.weight",
            "llama.rope.scaling.type",
            "gemma3",
            "output.weight",
        ),
    ),
    "safetensors": Target(
        check=check_safetensors,
        seeds=_safetensors_seeds,
        modules=("lemon_jax.model.weights", "lemon_jax.model.config"),
        words=('"__metadata__"', '"lemon_jax"', '"dtype"', '"shape"', '"data_offsets"', "num_layers", "BF16"),
    ),
}
