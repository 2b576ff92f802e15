"""Keys, scopes and recordings of worker calls."""

from __future__ import annotations

import lzma
import sqlite3
from contextlib import closing
from dataclasses import replace

import pytest

from lemon_jax.backends import Message, Reply, Request
from lemon_jax.errors import LemonError
from lemon_jax.runtime import CallStore, call_key, read_recording, write_recording

REQUEST = Request(
    model="m",
    messages=(Message(role="system", content="Add."), Message(role="user", content="2 + 3")),
    max_tokens=16,
    stop=("\n",),
    temperature=0.7,
    sample_index=1,
)
REPLY = Reply(text="Answer: 5", finish="stop", prompt_tokens=12, generated_tokens=3, seconds=0.5)


@pytest.fixture
def store():
    store = CallStore(None)
    yield store
    store.close()


@pytest.mark.parametrize(
    "change",
    [
        {"messages": REQUEST.messages[:1]},
        {"messages": REQUEST.messages[::-1]},
        {"messages": (Message(role="user", content="Add."), REQUEST.messages[1])},
        {"messages": (REQUEST.messages[0], Message(role="user", content="2 + 4"))},
        {"max_tokens": 17},
        {"stop": ()},
        {"stop": ("\n", "Question:")},
        {"temperature": 0.8},
        {"sample_index": 2},
    ],
    ids=str,
)
def test_every_field_is_part_of_the_key(change):
    assert call_key("weights", replace(REQUEST, **change)) != call_key("weights", REQUEST)


def test_the_weights_are_part_of_the_key_and_their_local_name_is_not():
    assert call_key("weights", REQUEST) != call_key("other weights", REQUEST)
    assert call_key("weights", REQUEST) == call_key("weights", replace(REQUEST, model="n"))


def test_sample_zero_is_greedy_at_any_temperature():
    greedy = replace(REQUEST, sample_index=0)
    assert call_key("weights", greedy) == call_key("weights", replace(greedy, temperature=0.0))


def test_a_key_is_stable_across_versions():
    assert call_key("weights", REQUEST) == "693b738c5f35759b08801a656825211d6b2a7686f2de172738680e78c314e99f"


def test_a_reply_comes_back_as_it_was(store):
    assert store.get("k", "a") is None
    reply = replace(REPLY, text="½ \u2028 \x00 é 🧮\r\n")
    store.put("k", "a", reply)
    assert store.get("k", "b") == reply
    assert store.replies() == {"k": reply}


def test_failures_are_not_kept(store):
    store.put("k", "a", Reply(text="", finish="error", error="HTTP 503"))
    assert store.get("k", "a") is None
    assert store.count() == 0


def test_a_prompt_that_does_not_fit_is_kept(store):
    long = Reply(text="", finish="overflow", prompt_tokens=7030, generated_tokens=0, error="long")
    store.put("k", "a", long)
    assert store.get("k", "b") == long
    assert store.tokens(["k"]) == 7030


def test_the_first_scope_and_the_first_reply_stay(store):
    store.put("k", "train:1", REPLY)
    store.put("k", "train:2", replace(REPLY, text="other"))
    assert store.get("k", "train:3") == REPLY
    assert store.origin(["k", "k", "unknown"]) == {"k": ("train:1", False)}


def test_a_recorded_call_belongs_to_the_scope_that_first_asks_for_it():
    store = CallStore(None, {"r": REPLY, "unasked": REPLY})
    store.put("live", "eval", REPLY)
    assert store.count() == 1
    assert store.get("r", "train:4") == REPLY
    assert store.get("r", "train:5") == REPLY
    assert store.origin(["r", "live", "unasked"]) == {"r": ("train:4", True), "live": ("eval", False)}
    assert [store.count(recorded=flag) for flag in (None, True, False)] == [2, 1, 1]
    store.close()


def test_a_store_on_disk_outlives_its_process(tmp_path):
    path = tmp_path / "calls.sqlite"
    first = CallStore(path)
    first.put("k", "a", REPLY)  # not closed before the next one reads: as after a kill
    second = CallStore(path)
    assert second.get("k", "b") == REPLY
    assert second.origin(["k"]) == {"k": ("a", False)}
    first.close()
    second.close()


def test_a_sound_store_that_cannot_be_written_now_is_not_to_be_moved_away(tmp_path, monkeypatch):
    path = tmp_path / "calls.sqlite"
    connect = sqlite3.connect
    monkeypatch.setattr(sqlite3, "connect", lambda *a, **k: connect(*a, timeout=0, **k))
    with closing(connect(path, isolation_level=None)) as other:
        other.execute("begin exclusive")
        with pytest.raises(
            LemonError, match=r"calls\.sqlite: database is locked; wait for the end of"
        ) as error:
            CallStore(path)
    assert "move it away" not in str(error.value)
    # A disk without room for the table.
    monkeypatch.setattr(sqlite3, "connect", lambda *a, **k: _full(connect(*a, **k)))
    with pytest.raises(LemonError, match="database or disk is full; make room, then go on"):
        CallStore(path)


def _full(db):
    db.execute("pragma max_page_count = 1")
    return db


def test_a_file_that_is_no_store(tmp_path):
    path = tmp_path / "notes.txt"
    path.write_text("not a database, " * 100)
    with pytest.raises(LemonError, match=r"notes\.txt: not a call store .*move it away"):
        CallStore(path)
    other = tmp_path / "other.sqlite"
    with sqlite3.connect(other) as db:
        db.execute("create table calls (name text)")
    db.close()
    with pytest.raises(LemonError, match=r"other\.sqlite: not a call store \(no such column"):
        CallStore(other)
    with pytest.raises(LemonError, match="folder that exists"):
        CallStore(tmp_path / "missing" / "calls.sqlite")


def test_recording_round_trip(tmp_path):
    texts = ["Answer: 5", "", "a\nb\r\n", "\u2028 \x85 \x1e \x0c", "½ é 🧮", '"quoted"']
    replies = {f"{i:064x}": replace(REPLY, text=text, seconds=0.0) for i, text in enumerate(texts)}
    replies["e" * 64] = Reply(text="", finish="overflow", prompt_tokens=7030, generated_tokens=0)
    replies["f" * 64] = Reply(text="cut", finish="length")
    write_recording(tmp_path / "a.xz", replies)
    assert read_recording(tmp_path / "a.xz") == replies
    write_recording(tmp_path / "b.xz", dict(reversed(replies.items())))
    assert (tmp_path / "a.xz").read_bytes() == (tmp_path / "b.xz").read_bytes()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a.xz", "b.xz"]


def test_an_empty_recording(tmp_path):
    write_recording(tmp_path / "a.xz", {})
    assert read_recording(tmp_path / "a.xz") == {}


def test_a_recording_holds_no_text_of_a_task(tmp_path):
    store = CallStore(None)
    secret = replace(REQUEST, messages=(Message(role="user", content="A very secret question"),))
    store.put(call_key("weights", secret), "a", REPLY)
    write_recording(tmp_path / "a.xz", store.replies())
    store.close()
    text = lzma.decompress((tmp_path / "a.xz").read_bytes()).decode()
    assert "secret" not in text
    assert text.count(call_key("weights", secret)) == 1


HEAD = '{"format": "lemon-calls-1"}\n'


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"no xz",
        lzma.compress(HEAD.encode())[:-9],
        lzma.compress(b""),
        lzma.compress(b'{"format": "lemon-calls-9"}\n'),
        lzma.compress((HEAD + '["k", "text"').encode()),
        lzma.compress((HEAD + '["k", "text"]').encode()),
        lzma.compress((HEAD + "5").encode()),
        lzma.compress((HEAD + '[["k"], "text", "stop", 1, 1]').encode()),
        lzma.compress(HEAD.encode() + b"\xff"),
    ],
    ids=["empty", "other", "cut", "blank", "version", "json", "short", "number", "key", "utf8"],
)
def test_a_damaged_recording(tmp_path, content):
    path = tmp_path / "a.xz"
    path.write_bytes(content)
    with pytest.raises(LemonError, match=r"a\.xz: not a readable call recording"):
        read_recording(path)


def test_a_missing_recording(tmp_path):
    with pytest.raises(LemonError, match="not a readable call recording"):
        read_recording(tmp_path / "a.xz")
