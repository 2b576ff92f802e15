"""Keys and passwords kept out of error texts, and out of replies that echo them."""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Sequence
from urllib.parse import quote

_LOOKS_SECRET = re.compile(
    r"\bbearer\s+\S+|\b(?:sk-|gsk_|hf_|AIza|AKIA|eyJ)[\w.-]{8,}|(?<=://)[^/\s@]+@"
    r"|(?<=[?&])[\w-]{0,40}(?:key|token|secret|password|signature)[\w-]{0,40}=[^\s&'\"]+",
    re.IGNORECASE,
)
_SHORTEST = 8  # "EMPTY" and "ollama" are words that a reply may hold, not keys
_PUT_INSTEAD = "[redacted]"


def secret_forms(secrets: Sequence[str]) -> tuple[str, ...]:
    """The secrets as a server may send them back: plain, escaped for JSON or a URL, in base64."""
    forms = set()
    for secret in filter(None, secrets):
        escaped = quote(secret, safe="")
        forms |= {secret, json.dumps(secret)[1:-1], escaped}
        forms.add(re.sub("%[0-9A-F]{2}", lambda code: code[0].lower(), escaped))
        # Of the whole header too: inside it the base64 of the key is another.
        forms |= {base64.b64encode(text.encode()).decode() for text in (secret, f"Bearer {secret}")}
    return tuple(sorted(forms, key=lambda form: (-len(form), form)))  # a part of another comes after it


def is_variable_name(text: str) -> bool:
    """Whether a text names an environment variable, and is not rather the key that belongs into one."""
    mixed = re.search("[a-z]", text) and re.search("[0-9]", text)
    return bool(re.fullmatch("[A-Za-z_][A-Za-z0-9_]{0,63}", text)) and not (mixed and len(text) > 16)


def hide(text: str, secrets: Sequence[str]) -> str:
    """A reply's text without the secrets, for a server that echoes what it was sent."""
    for secret in secrets:
        if len(secret) >= _SHORTEST:
            text = text.replace(secret, _PUT_INSTEAD)
    return text


def redact(text: str, secrets: Sequence[str] = (), limit: int = 200) -> str:
    """One line of at most `limit` characters without the secrets or anything that looks like one."""
    for secret in secrets:
        text = text.replace(secret, _PUT_INSTEAD)
    # Cut only after redacting: half a key at the end would be beyond recognition, not beyond use.
    return " ".join(_LOOKS_SECRET.sub(_PUT_INSTEAD, text).split())[:limit]
