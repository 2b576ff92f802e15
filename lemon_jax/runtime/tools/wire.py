"""Plain Python values as bytes, for a reader who does not trust the writer.

What comes out of `decode` is made of exact built-in types, whatever went in: an integer that claims to
equal everything arrives as its number, and an object of a class of its own does not arrive. Copies, not
references: changes to a decoded list do not reach the original.

Subclasses of a built-in type travel as that type (a Counter as a dict, an IntEnum as an int), Fraction
and Decimal as themselves, anything else that can be iterated (a generator, a deque, dict views) as an
iterator over its items. Both processes of a HumanEval check load this before anything else, so it imports
nothing that it may not need.

A value is a tag, a length or count of four bytes, and the content:
In: (True, [1])  Out: b"t" 0 0 0 2, b"T", b"l" 0 0 0 1, b"i" 0 0 0 1, b"\\x01"
"""

MAX_BYTES = 1 << 20
MAX_DEPTH = 64

_SINGLE = {b"N": None, b"T": True, b"F": False}
_SEQUENCES = {b"l": list, b"t": tuple, b"S": set, b"Z": frozenset}


class WireError(ValueError):
    """The value cannot travel, or the bytes are no value; the message is one line."""


def encode(value):
    """Bytes of `value`, at most MAX_BYTES; WireError where it is, or holds, what cannot travel."""
    out = bytearray()
    _write(value, out, MAX_DEPTH)
    return bytes(out)


def _write(value, out, depth):
    kind = type(value)
    if value is None or kind is bool:
        out += b"N" if value is None else b"T" if value else b"F"
    # The methods of the built-in types, not the value's own: a subclass may have replaced those.
    elif issubclass(kind, int):
        _chunk(out, b"i", int.to_bytes(value, int.bit_length(value) // 8 + 1, "big", signed=True))
    elif issubclass(kind, float):
        _chunk(out, b"f", float.hex(value).encode())
    elif issubclass(kind, str):
        _chunk(out, b"s", str.encode(value, "utf-8", "surrogatepass"))
    elif issubclass(kind, bytes):
        _chunk(out, b"b", bytes.__getitem__(value, slice(None)))
    elif issubclass(kind, bytearray):
        _chunk(out, b"B", bytearray.__getitem__(value, slice(None)))
    elif kind.__module__ == "decimal" and kind.__name__ == "Decimal":
        _chunk(out, b"D", str(value).encode())
    else:
        tag, items = _parts(value, kind)
        if depth == 0:
            raise WireError(f"a value nested more than {MAX_DEPTH} deep")
        _chunk(out, tag, b"", len(items))
        for item in items:
            _write(item, out, depth - 1)


def _parts(value, kind):
    """Tag and items of a compound value."""
    if issubclass(kind, complex):
        plain = complex.__pos__(value)
        return b"c", [plain.real, plain.imag]
    if kind is range:
        return b"r", [value.start, value.stop, value.step]
    if kind.__module__ == "fractions" and kind.__name__ == "Fraction":
        return b"Q", [value.numerator, value.denominator]
    if issubclass(kind, dict):
        return b"d", [part for pair in dict.items(value) for part in pair]
    for tag, base in _SEQUENCES.items():
        if issubclass(kind, base):
            return tag, list(vars(base)["__iter__"](value))
    if not hasattr(kind, "__iter__"):
        raise WireError(f"a {kind.__name__}, which is no plain value")
    items = []
    for item in value:
        items.append(item)
        if len(items) > MAX_BYTES:
            raise WireError(f"an iterator of more than {MAX_BYTES} items")
    return b"I", items


def _chunk(out, tag, content, size=None):
    out += tag
    out += (len(content) if size is None else size).to_bytes(4, "big")
    out += content
    if len(out) > MAX_BYTES:
        raise WireError(f"a value of more than {MAX_BYTES} bytes")


def decode(data):
    """The value of `data`; WireError if these are not exactly the bytes of one."""
    try:
        value, end = _read(data, 0, MAX_DEPTH)
    except WireError:
        raise
    except (ValueError, TypeError, ArithmeticError) as error:  # an unhashable key, bad UTF-8, x / 0
        raise WireError(f"bytes that are no value: {error}"[:200]) from None
    if end != len(data):
        raise WireError("bytes after the end of a value")
    return value


def _read(data, at, depth):
    """The value that starts at `at`, and where it ends."""
    tag = data[at : at + 1]
    at += 1
    if tag in _SINGLE:
        return _SINGLE[tag], at
    size = int.from_bytes(data[at : at + 4], "big")
    at += 4
    if size > len(data) - at:  # an item takes a byte at least
        raise WireError("bytes that end within a value")
    if tag in b"ifsbBD":
        return _scalar(tag, data[at : at + size]), at + size
    if depth == 0:
        raise WireError(f"a value nested more than {MAX_DEPTH} deep")
    items = []
    for _ in range(size):
        item, at = _read(data, at, depth - 1)
        items.append(item)
    return _compound(tag, items), at


def _scalar(tag, content):
    if tag == b"i":
        return int.from_bytes(content, "big", signed=True)
    if tag == b"f":
        return float.fromhex(content.decode())
    if tag == b"s":
        return content.decode("utf-8", "surrogatepass")
    if tag == b"D":
        from decimal import Decimal

        return Decimal(content.decode())
    return bytes(content) if tag == b"b" else bytearray(content)


def _compound(tag, items):
    if tag in _SEQUENCES:
        return _SEQUENCES[tag](items)
    if tag == b"d":
        return dict(zip(items[::2], items[1::2], strict=True))
    if tag == b"I":
        return iter(items)
    if tag == b"r":
        return range(*_all_of(items, int, 3))
    if tag == b"c":
        return complex(*_all_of(items, float, 2))
    if tag == b"Q":
        from fractions import Fraction

        return Fraction(*_all_of(items, int, 2))
    raise WireError(f"bytes that are no value: no tag {tag!r}")


def _all_of(items, kind, count):
    if len(items) != count or any(type(item) is not kind for item in items):
        raise WireError("bytes that are no value: wrong parts")
    return items
