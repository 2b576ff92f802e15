"""A folder in the hub's layout: config.json with one safetensors file, or several under an index."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import safetensors

from lemon_jax.errors import LemonError
from lemon_jax.model.families import Place, to_parameter
from lemon_jax.model.hub_config import decoder_config

CONFIG_FILE = "config.json"
WEIGHTS_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
FILE_DTYPES = ("F32", "BF16", "F16")
# Tensors that are no parameters of the decoder: a buffer old files store, and Gemma 3's eyes.
_IGNORED = re.compile(r".*rotary_emb\.inv_freq|(model\.)?(vision_tower|multi_modal_projector)\..*")


class HubSource:
    """The source that `pretrained` reads; see there."""

    def __init__(self, folder: Path):
        self.path = folder
        values = read_json(folder / CONFIG_FILE)
        self.config, self._family = decoder_config(values, str(folder / CONFIG_FILE))
        self._files: dict[str, Any] = {}
        self._where: dict[str, tuple[Path, str]] = {}  # a tensor's name here: its file, its name there
        self._shapes: dict[str, tuple[int, ...]] = {}
        for path, listed in _weight_files(folder).items():
            self._add(path, listed)

    def _add(self, path: Path, listed: set[str] | None) -> None:
        file = self._files[str(path)] = open_safetensors(path)
        names = set(file.keys())
        if listed is not None and (absent := sorted(listed - names)):
            raise LemonError(
                f"{path}: lacks {len(absent)} tensors that {INDEX_FILE} says it holds ({absent[0]!r:.80}); "
                "fetch the model again"
            )
        for name in sorted(names):
            ours = name.replace("language_model.", "", 1)  # the text part of Gemma 3 with eyes
            if _IGNORED.fullmatch(ours) or (ours == "lm_head.weight" and self.config.tie_embeddings):
                continue
            if ours in self._where:
                raise LemonError(f"{path}: {name!r:.80} is stored twice; fetch the model again")
            part = file.get_slice(name)
            if part.get_dtype() not in FILE_DTYPES:
                raise LemonError(
                    f"{path}: {name!r:.80} is of type {part.get_dtype()}, expected one of "
                    f"{', '.join(FILE_DTYPES)}; use a model that is not quantised, or a GGUF file"
                )
            self._where[ours] = path, name
            self._shapes[ours] = tuple(part.get_shape())

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        return self._shapes

    def name(self, place: Place) -> str:
        return place.hub

    def read(self, place: Place, dtype: np.dtype) -> np.ndarray:
        path, name = self._where[place.hub]
        array = self._files[str(path)].get_tensor(name)
        if place.norm and self._family.hub_norm_offset:
            array = array.astype(np.float32) + np.float32(self._family.hub_norm_offset)
        return to_parameter(array.astype(dtype), place)


def read_json(path: Path) -> dict[str, Any]:
    """The object of a JSON file. Raises `LemonError` where there is none."""
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise LemonError(
            f"{path}: cannot read it ({error.strerror}); name a folder that holds {CONFIG_FILE} and "
            f"{WEIGHTS_FILE}, or a .gguf file"
        ) from error
    except (ValueError, RecursionError) as error:
        raise LemonError(f"{path}: not JSON ({str(error)[:80]}); fetch the model again") from error
    if not isinstance(values, dict):
        raise LemonError(f"{path}: expected a JSON object; fetch the model again")
    return values


def _weight_files(folder: Path) -> dict[Path, set[str] | None]:
    """The files with the tensors that each must hold; None where no index says."""
    if not (folder / INDEX_FILE).exists():
        return {folder / WEIGHTS_FILE: None}
    index = folder / INDEX_FILE
    listed = read_json(index).get("weight_map")
    if not isinstance(listed, dict) or not listed:
        raise LemonError(f"{index}: weight_map is {listed!r:.80}, expected tensor names with their files")
    out: dict[Path, set[str] | None] = {}
    for tensor, name in listed.items():
        # The name comes from the file: it must not lead out of the folder.
        if not isinstance(name, str) or not re.fullmatch(r"[\w.-]+\.safetensors", name):
            raise LemonError(
                f"{index}: weight_map puts {tensor!r:.80} into {name!r:.80}, expected the name of a "
                ".safetensors file beside it; fetch the model again"
            )
        named = out.setdefault(folder / name, set())
        assert named is not None
        named.add(tensor)
    return out


def open_safetensors(path: Path) -> Any:
    """A file whose tensors are read one by one. Raises `LemonError` where it is missing or damaged."""
    try:
        return safetensors.safe_open(path, "numpy")
    except OSError as error:
        raise LemonError(f"{path}: cannot read it ({error}); fetch the model's missing files") from error
    except safetensors.SafetensorError as error:
        raise LemonError(f"{path}: damaged ({str(error)[:120]}); fetch it again") from error
