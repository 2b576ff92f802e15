from __future__ import annotations

import asyncio
import hashlib
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
from fault_server import chat, serving
from test_download import Hub

from lemon_jax.backends import (
    Message,
    Request,
    ScriptedBackend,
    WorkerPool,
    load_worker_file,
    parse_worker_file,
    worker_config,
)
from lemon_jax.errors import LemonError

_SHA256_OF_GGUF = hashlib.sha256(b"GGUF").hexdigest()[:16]
CAPACITIES = "".join(f'[capacities.{c}]\nmodel = "m"\nprice = 1\n' for c in ("small", "medium", "large"))
SCRIPTED = '[models.m]\nbackend = "scripted"\n' + CAPACITIES


def openai(url, more=""):
    return f'[models.m]\nbackend = "openai"\nbase_url = "{url}"\nmodel = "x"\n{more}\n' + CAPACITIES


def parse(text):
    return parse_worker_file(text, source="w.toml", folder=Path("/models"))


def test_shipped_files():
    embedded, scripted = worker_config("embedded"), worker_config("scripted")
    assert embedded.models[embedded.capacities["small"].model].preset == "qwen2.5-coder-0.5b"
    large = embedded.capacities["large"]
    assert (large.price, large.samples, large.temperature, large.max_tokens) == (3.0, 5, 0.7, 512)
    assert {m.backend for m in scripted.models.values()} == {"scripted"}
    assert embedded.cost == scripted.cost
    assert (embedded.cost.generated, embedded.cost.prompt, embedded.cost.fixed_prefix) == (1.0, 0.25, 0.025)


def test_paths_are_relative_to_the_file(tmp_path):
    (tmp_path / "w.toml").write_text('[models.m]\nbackend = "embedded"\npath = "a.gguf"\n' + CAPACITIES)
    model = load_worker_file(tmp_path / "w.toml").models["m"]
    assert model.path == tmp_path / "a.gguf"
    assert parse(openai("http://h/v1")).models["m"].slots == 16


def test_deterministic_means_one_slot():
    text = '[models.m]\nbackend = "embedded"\npath = "a"\ndeterministic = true\n'
    assert parse(text + CAPACITIES).models["m"].slots == 1
    with pytest.raises(LemonError, match=r"models\.m\.slots: found 4, expected 1"):
        parse(text + "slots = 4\n" + CAPACITIES)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (SCRIPTED + 'modle = "m"', "capacities.large.modle: unknown key"),
        (SCRIPTED + 'modle = "m"', "did you mean model?"),
        (SCRIPTED.replace('"scripted"', '"vllm"'), "models.m.backend: found 'vllm', expected one of openai"),
        (SCRIPTED.replace('model = "m"', 'model = "n"'), "found 'n', expected a name under [models]"),
        (SCRIPTED.replace("price = 1", "price = -1"), "capacities.small.price: found -1, expected a number"),
        (SCRIPTED.replace("price = 1", "price = nan"), "capacities.small.price: found nan"),
        (SCRIPTED.replace("price = 1", "price = true"), "capacities.small.price: found True"),
        (SCRIPTED.replace("price = 1\n", ""), "capacities.small.price: missing"),
        (SCRIPTED + "samples = 3", "capacities.large.temperature: expected above 0"),
        (SCRIPTED + "samples = 1.5", "capacities.large.samples: found 1.5, expected an integer"),
        (SCRIPTED.replace("capacities.large", "capacities.huge"), "capacities.large: missing"),
        (SCRIPTED.replace("capacities.large", "capacities.huge"), "capacities.huge: unknown key"),
        (
            SCRIPTED.replace("[models.m]", "[models.m]\nslots = 4"),
            'slots: unknown key for backend = "scripted"',
        ),
        (SCRIPTED + "[cost]\nprompts = 1", "did you mean prompt?"),
        ("models = 3\n" + CAPACITIES, "models: expected tables"),
        ("", "capacities: expected tables"),
        ("x = [", "not valid TOML"),
        (openai("http://h:port/v1"), "expected an address"),
        (openai("localhost:8000"), "models.m.base_url: found 'localhost:8000', expected an address"),
        ('[models.m]\nbackend = "embedded"\n' + CAPACITIES, "expected either path"),
        ('[models.m]\nbackend = "embedded"\npreset = "q"\n' + CAPACITIES, "expected one of qwen2.5"),
        ('[models.m]\nbackend = "jax"\n' + CAPACITIES, "expected either path"),
        (
            '[models.m]\nbackend = "jax"\npath = "a"\nweights = "q4"\n' + CAPACITIES,
            "models.m.weights: found 'q4', expected one of bfloat16, float32",
        ),
        (
            '[models.m]\nbackend = "jax"\npath = "a"\nthreads = 2\n' + CAPACITIES,
            'models.m.threads: unknown key for backend = "jax"',
        ),
        (
            '[models.m]\nbackend = "embedded"\npath = "a"\ncontext = 512\n' + CAPACITIES,
            "max_tokens: expected below models.m.context = 512",
        ),
    ],
)
def test_faults_name_key_found_and_expected(text, expected):
    with pytest.raises(LemonError) as e:
        parse(text)
    assert str(e.value).startswith("w.toml: ")
    assert expected in str(e.value)
    assert "\n" not in str(e.value)


def test_all_faults_in_one_message_without_passwords():
    with pytest.raises(LemonError) as e:
        parse(openai("http://user:pass@h/v1", "slotz = 3").replace("price = 1", "price = 'x'"))
    text = str(e.value)
    assert "pass" not in text
    assert all(part in text for part in ("base_url", "slotz", "small.price", "large.price"))


def test_missing_and_undecodable_files(tmp_path):
    with pytest.raises(LemonError, match="give a TOML file or one of embedded, jax, scripted"):
        worker_config(str(tmp_path / "none.toml"))
    (tmp_path / "bad.toml").write_bytes(b"\xff\xfe")
    with pytest.raises(LemonError, match="not UTF-8"):
        load_worker_file(tmp_path / "bad.toml")


def run_pool(text, use):
    async def run():
        async with WorkerPool(parse(text)) as pool:
            return await use(pool)

    return asyncio.run(run())


def test_pool_opens_once_and_answers():
    async def use(pool):
        backend = pool.backend("m")
        assert isinstance(backend, ScriptedBackend)
        assert backend is pool.backend("m")
        assert pool.capacity("small").price == 1
        assert pool.identity("small") == "scripted:1:m"
        await pool.check()
        request = Request(model="m", messages=(Message(role="user", content="1 and 2"),), max_tokens=9)
        return [reply.finish async for _, reply in backend.generate([request])]

    assert run_pool(SCRIPTED, use) == ["stop"]


def test_check_names_address_and_key(monkeypatch):
    async def check(pool):
        await pool.check()

    with pytest.raises(LemonError, match=r"models\.m\.base_url: http://127\.0\.0\.1:9/v1: cannot reach"):
        run_pool(openai("http://127.0.0.1:9/v1"), check)
    with pytest.raises(LemonError, match="LEMON_NO_SUCH_KEY is not set"):
        run_pool(openai("http://127.0.0.1:9/v1", 'api_key_env = "LEMON_NO_SUCH_KEY"'), check)
    with serving(Hub, ranges=[], data=b"{}") as (url, _):
        run_pool(openai(url), check)


def test_check_asks_once_for_a_model_that_is_not_listed():
    async def check(pool):
        await pool.check()

    unknown = (404, {"error": {"message": "The model `x` does not exist."}})
    with serving(steps=[unknown], models=["y", "z"]) as (url, state):
        with pytest.raises(LemonError, match=r"^w\.toml: models\.m\.model: .* refuses x \(HTTP 404: .*y, z$"):
            run_pool(openai(url + "/v1"), check)
        assert len(state["bodies"]) == 1
    for steps, models, asked in (
        ([chat()], ["y"], 1),  # an alias
        ([unknown], ["y", "x"], 0),
        ([unknown], [], 0),
    ):
        with serving(steps=steps, models=models) as (url, state):
            run_pool(openai(url + "/v1"), check)
            assert len(state["bodies"]) == asked


def test_requests_in_a_server_s_own_dialect():
    request = Request(
        model="m", messages=(Message(role="user", content="Hi"),), max_tokens=9, stop=("\n",), sample_index=1
    )

    async def ask(pool):
        backend = pool.backend("m")
        return [reply.text async for _, reply in backend.generate([request])], pool.identity("small")

    gpt = 'rename = { max_tokens = "max_completion_tokens" }\nomit = ["temperature", "stop"]\n'
    mistral = 'rename = { seed = "random_seed" }\n'
    thinking = "extra_body = { chat_template_kwargs = { enable_thinking = false } }\n"
    plain = {"model", "messages", "max_tokens", "temperature", "seed", "stop", "stream"}
    identities = set()
    with serving(steps=[chat("5")]) as (url, state):
        for more, fields in (
            ("", plain),
            (gpt, plain - {"max_tokens", "temperature", "stop"} | {"max_completion_tokens"}),
            (mistral, plain - {"seed"} | {"random_seed"}),
            (thinking, plain | {"chat_template_kwargs"}),
            (thinking + 'identity = "w"\n', plain | {"chat_template_kwargs"}),
        ):
            texts, identity = run_pool(openai(url + "/v1", more), ask)
            assert texts == ["5"]
            assert state["bodies"][-1].keys() == fields
            identities.add(identity)
    assert len(identities) == 5
    assert f"openai:x@{url.removeprefix('http://')}" in identities  # nothing of it without these keys
    assert state["bodies"][1]["max_completion_tokens"] == 9
    assert state["bodies"][2]["random_seed"] == state["bodies"][0]["seed"]
    assert state["bodies"][3]["chat_template_kwargs"] == {"enable_thinking": False}


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ('rename = { tokens = "max_tokens" }', "models.m.rename: found {'tokens': 'max_tokens'}, expected a"),
        ('rename = { seed = "stop" }', "models.m.rename: found"),
        ('rename = { seed = "s", stop = "s" }', "models.m.rename: found"),
        ('omit = ["model"]', "models.m.omit: found ['model'], expected a list of max_tokens or"),
        ('rename = { seed = "s" }\nomit = ["seed"]', "models.m.omit: found ['seed'], which rename has too"),
        ("extra_body = { stream = true }", "models.m.extra_body: found something else, expected a table of"),
        ("extra_body = { day = 2026-01-01 }", "models.m.extra_body: found something else"),
        ("extra_body = { top_p = inf }", "models.m.extra_body: found something else"),
    ],
)
def test_faults_of_a_dialect(line, expected):
    with pytest.raises(LemonError) as e:
        parse(openai("http://h/v1", line))
    assert expected in str(e.value)


def test_a_server_may_be_given_the_identity_of_its_weights():
    async def identities(pool):
        return pool.identity("small"), pool.identity("large")

    weights = "gguf:1d9614638d18024d"
    given = run_pool(openai("http://h/v1", f'identity = "{weights}"'), identities)
    assert given == (weights, weights)
    assert run_pool(openai("http://h/v1"), identities) == ("openai:x@h", "openai:x@h")
    for url, place in (
        ("https://gw.org/small/v1", "gw.org/small/v1"),
        ("https://gw.org/large/v1/", "gw.org/large/v1"),
        ("https://gw.org/a%2Fb/v1", "gw.org/a%2Fb/v1"),
        ("http://h:8000/v1/", "h:8000"),
        ("http://h", "h/"),
        ("http://h/", "h/"),
    ):
        assert run_pool(openai(url), identities) == (f"openai:x@{place}",) * 2
    with pytest.raises(LemonError, match=r"models\.m\.identity: found '', expected a text"):
        parse(openai("http://h/v1", 'identity = ""'))


def test_a_model_on_jax_has_many_slots_and_its_weights_in_its_identity(tmp_path):
    (tmp_path / "a.gguf").write_bytes(b"GGUF")
    table = '[models.m]\nbackend = "jax"\npath = "a.gguf"\n'
    for line, weights in (("", "bfloat16"), ('weights = "float32"\n', "float32")):
        config = parse_worker_file(table + line + CAPACITIES, source="s", folder=tmp_path)
        assert config.models["m"].slots == 32
        assert WorkerPool(config).backend("m").identity == f"jax:{_SHA256_OF_GGUF}:{weights}"


def test_embedded_identity_needs_no_model_file():
    async def use(pool):
        return pool.identity("small"), pool.identity("large")

    async def run():
        async with WorkerPool(worker_config("embedded")) as pool:
            return await use(pool)

    assert asyncio.run(run()) == ("gguf:1d9614638d18024d", "gguf:cc324af070c2ecbf")


def test_embedded_path_faults(tmp_path, monkeypatch):
    monkeypatch.setenv("LEMON_CACHE", str(tmp_path))
    text = f'[models.m]\nbackend = "embedded"\npath = "{tmp_path}/none.gguf"\n' + CAPACITIES

    async def identity(pool):
        return pool.identity("small")

    with pytest.raises(LemonError, match=r"models\.m\.path: cannot read"):
        run_pool(text, identity)


SIMULATED = "".join(
    f'[models.{c}]\nbackend = "simulated"\nlevel = "{c}"\n[capacities.{c}]\nmodel = "{c}"\nprice = 1\n'
    for c in ("small", "medium", "large")
)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('level = "small"', 'level = "tiny"', "models.small.level: found 'tiny', expected one of small"),
        ('level = "small"', 'level = "large"', "capacities.large.model: has the level large, as capac"),
        ('model = "small"\n', 'model = "small"\nsamples = 5\ntemperature = 1\n', "samples: has no effect"),
        (
            'model = "small"\n',
            'model = "small"\nmax_tokens = 9\n',
            "max_tokens: has no effect on",
        ),
        ('level = "small"\n', 'level = "small"\nseed = -1\n', "models.small.seed: found -1"),
        ('backend = "simulated"\nlevel = "small"', 'backend = "scripted"', "simulated ones stand alone"),
    ],
)
def test_faults_of_simulated_models(old, new, message):
    assert parse(SIMULATED).models["small"].level == "small"
    with pytest.raises(LemonError, match=message):
        parse(SIMULATED.replace(old, new, 1))
