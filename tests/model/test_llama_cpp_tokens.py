"""Rebuilt tokenizers against llama.cpp's own, on the same model files, where there are any."""

from __future__ import annotations

import asyncio

import httpx
import pytest
from real_models import NAMES, real_model
from text_samples import samples

from lemon_jax.backends.embedded import EmbeddedServer
from lemon_jax.model.pretrained_text import load_pretrained_text

TEXTS = samples(320)


async def llama_cpp(path, texts: list[str]) -> dict[bool, list[list[int]]]:
    """Its ids of each text, by whether control symbols are read as such."""
    async with EmbeddedServer(path, slots=1, context=256, threads=1) as server:
        headers = {"Authorization": f"Bearer {server.api_key}"}
        url = server.base_url.removesuffix("/v1") + "/tokenize"
        async with httpx.AsyncClient(timeout=60, trust_env=False, headers=headers) as client:
            out = {}
            for special in (False, True):
                out[special] = []
                for text in texts:
                    body = {"content": text, "add_special": False, "parse_special": special}
                    reply = await client.post(url, json=body)
                    reply.raise_for_status()
                    out[special].append(reply.json()["tokens"])
            return out


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_the_same_ids_as_llama_cpp(name):
    pytest.importorskip("xllamacpp", reason="needs the package xllamacpp")
    path = real_model(name)
    tokenizer = load_pretrained_text(path, 0).tokenizer
    theirs = asyncio.run(llama_cpp(path, TEXTS))
    for special, encode in {False: tokenizer.encode, True: tokenizer.encode_prompt}.items():
        differ = [
            (t, encode(t), ids) for t, ids in zip(TEXTS, theirs[special], strict=True) if encode(t) != ids
        ]
        assert not differ, differ[:3]
    for text in TEXTS:
        assert tokenizer.decode(tokenizer.encode(text)) == text
