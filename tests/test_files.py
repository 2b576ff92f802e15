"""A file that is replaced holds the old content or the new one, and nothing is left beside it."""

import errno
import os
import stat

import pytest

from lemon_jax.files import PART, create_file, replace_file


@pytest.mark.parametrize("several_writers", [False, True])
@pytest.mark.parametrize("durable", [False, True])
@pytest.mark.parametrize("content", [b"n\xe9w", "né\n\u2028w"])
def test_the_new_content_takes_the_name(tmp_path, content, durable, several_writers):
    path = tmp_path / "f.json"
    path.write_bytes(b"old")
    replace_file(path, content, durable=durable, several_writers=several_writers)
    assert path.read_bytes() == (content if isinstance(content, bytes) else content.encode())
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("several_writers", [False, True])
@pytest.mark.parametrize("function", ["fsync", "replace"])
def test_a_failure_leaves_the_old_content_alone(tmp_path, monkeypatch, function, several_writers):
    path = tmp_path / "f"
    path.write_bytes(b"old")

    def fail(*_):
        raise OSError("disk full")

    monkeypatch.setattr(os, function, fail)
    with pytest.raises(OSError, match="disk full"):
        replace_file(path, b"new", durable=True, several_writers=several_writers)
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]


def test_writers_at_the_same_time_do_not_share_what_they_write_to(tmp_path, monkeypatch):
    seen = []
    monkeypatch.setattr(os, "replace", lambda part, _: seen.append(part.name))
    for content in (b"one", b"two"):
        replace_file(tmp_path / "f", content, several_writers=True)
    assert len({*seen}) == 2
    assert all(name.startswith("f.") and name.endswith(PART) for name in seen)


def test_what_a_kill_left_is_written_over(tmp_path):
    (tmp_path / f"f{PART}").write_bytes(b"a longer text than the new one")
    replace_file(tmp_path / "f", b"new")
    assert [p.name for p in tmp_path.iterdir()] == ["f"]
    assert (tmp_path / "f").read_bytes() == b"new"


def test_permissions_are_the_umasks_or_the_ones_asked_for(tmp_path):
    before = os.umask(0o077)
    try:
        replace_file(tmp_path / "own", b"")
        replace_file(tmp_path / "shared", b"", mode=0o644)
    finally:
        os.umask(before)
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in tmp_path.iterdir()}
    assert modes == {"own": 0o600, "shared": 0o644}


@pytest.mark.parametrize("hard_links", [True, False])
def test_a_new_file_is_created_once(tmp_path, monkeypatch, hard_links):
    def refused(*_):
        raise OSError(errno.EPERM, "no hard links here")

    if not hard_links:
        monkeypatch.setattr(os, "link", refused)
    path = tmp_path / "f.json"
    create_file(path, "first\n")
    with pytest.raises(FileExistsError):
        create_file(path, "second\n")
    assert path.read_text() == "first\n"
    assert list(tmp_path.iterdir()) == [path]
