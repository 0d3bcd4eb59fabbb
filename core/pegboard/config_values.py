"""The values that the config's keys take: their types, and what is said when one is refused."""

from __future__ import annotations

import difflib
import os
import re
import reprlib
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal, get_args

from pydantic import BeforeValidator, PlainValidator
from pydantic_core import PydanticCustomError

Auto = Literal["auto"]
MAX_COUNT = 2**31 - 1
MAX_THREADS = 1024
MAX_DEPTH = 8
MAX_DRAFT_NODES = 64
MAX_STEP_MS = 3_600_000

_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*(B|KiB|MiB|GiB|TiB|KB|MB|GB|TB)?", re.IGNORECASE)
_UNITS = {"": 1, "b": 1} | {
    prefix + suffix: base**power
    for suffix, base in (("ib", 1024), ("b", 1000))
    for power, prefix in enumerate("kmgt", start=1)
}


# What YAML's aliases make of a few lines may be endless when written out.
_SHORT = reprlib.Repr()
_SHORT.maxlevel = 4
_SHORT.maxstring = _SHORT.maxlong = _SHORT.maxother = 100


def parse_size(text: str) -> int | None:
    """Bytes of `8MiB`, `2 GB`, `4096`; None when it is not a size."""
    match = _SIZE.fullmatch(text.strip())
    if match is None:
        return None
    unit: int = _UNITS[(match[2] or "").lower()]
    return round(float(match[1]) * unit)


def shown(value: Any) -> str:
    """A value as an error message shows it: short, on one line."""
    text = _SHORT.repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def nearest(name: str, known: Sequence[str]) -> str | None:
    """The known name that was probably meant."""
    return next(iter(difflib.get_close_matches(name, known, n=1, cutoff=0.6)), None)


def refused(was: str, allowed: str = "", fix: str = "") -> PydanticCustomError:
    """The error that a validator raises; `config_text.explain` makes a ConfigError of it."""
    return PydanticCustomError("refused", "{was}", {"was": was, "allowed": allowed, "fix": fix})


def one_of(literal: Any) -> PlainValidator:
    """Accepts the words of a Literal type."""
    words = get_args(literal)

    def read(value: Any) -> str:
        if isinstance(value, str) and value in words:
            return value
        meant = nearest(str(value), words)
        fix = f"did you mean {meant!r}?" if meant else ""
        raise refused(shown(value), ", ".join(words), fix)

    return PlainValidator(read)


def whole(
    low: int, high: int = MAX_COUNT, *, words: Sequence[str] = (), span: str = ""
) -> PlainValidator:
    """Accepts a whole number of a range, and words; of these, `none` is None.

    Args:
        low, high: the range.
        words: beside numbers.
        span: the numbers in words; "": they are shown.
    """
    span = span or f"a whole number, {low} to {high}"
    allowed = f"{', '.join(words)}, or {span}" if words else span

    def read(value: Any) -> int | str | None:
        if "none" in words and value in (None, "none"):
            return None
        if isinstance(value, str) and value in words:
            return value
        if type(value) is not int or not low <= value <= high:
            raise refused(shown(value), allowed)
        return value

    return PlainValidator(read)


def _text(value: Any) -> str:
    if isinstance(value, str) and value:
        return value
    is_scalar = isinstance(value, (bool, int, float))
    raise refused(shown(value), "a text", f'in quotes: "{value}"' if is_scalar else "")


def _place(value: Any) -> str:
    return _text(os.fspath(value) if isinstance(value, os.PathLike) else value)


def _host(value: Any) -> str:
    host = _text(value)
    try:
        host.encode("idna")
    except UnicodeError:
        raise refused(shown(host), "a host's name or address") from None
    if not host.isprintable():
        raise refused(shown(host), "a host's name or address")
    return host


def _hosts(value: Any) -> list[str]:
    hosts = [value] if isinstance(value, str) else value
    if not isinstance(hosts, (list, tuple)):
        raise refused(shown(value), "a list of hosts")
    for host in map(_host, hosts):
        is_address = set(host) <= set("0123456789abcdefABCDEF:.[]")
        if re.search(r"[\s/?#@*]", host) or (":" in host and not is_address):
            raise refused(shown(host), "a host's name or address alone, such as box.example.org")
    return list(hosts)


def _optional_text(value: Any) -> str | None:
    return None if value in (None, "none") else _text(value)


def _size(value: Any) -> int:
    size = parse_size(str(value)) if type(value) in (int, str) else None
    if not size:
        raise refused(shown(value), "a size in bytes, such as 8MiB")
    return size


def _memory(value: Any) -> int | float | Auto:
    if value == "auto":
        return "auto"
    number = _number(value)
    if number is not None and 0 < number <= 1:
        return float(number)
    # A bare number between is a mistaken percentage, not so many bytes.
    if number is not None and 1024 <= number < 2**63:
        return round(number)
    raise refused(shown(value), "auto, a size such as 2GiB, or a fraction over 0, at most 1")


def _number(value: Any) -> int | float | None:
    if isinstance(value, str):
        try:
            return float(value)
        except ValueError:
            return parse_size(value)
    return value if type(value) in (int, float) else None


def _texts(value: Any) -> list[str]:
    if not isinstance(value, (list, tuple)):
        raise refused(shown(value), "a list of texts")
    return [_place(text) for text in value]


def _served_names(value: Any) -> str | list[str]:
    if isinstance(value, (list, tuple)) and value:
        return [_text(name) for name in value]
    if isinstance(value, (list, tuple, Mapping)):
        raise refused(shown(value), "auto, a text, or a list of texts")
    return _text(value)


def _api_keys(value: Any) -> list[str] | None:
    if value in (None, "none"):
        return None
    # Not shown: what stands there may hold a secret.
    keys = [value] if isinstance(value, str) else value
    if not (isinstance(keys, (list, tuple)) and keys and all(isinstance(k, str) for k in keys)):
        raise refused("not a list of texts", "none, a text, or a list of texts")
    if not all(key.strip() for key in keys):
        raise refused("a blank key", "none, a text, or a list of texts", "leave it out")
    return list(keys)


def _table(value: Any) -> dict[str, Any]:
    if isinstance(value, Mapping) and all(isinstance(key, str) for key in value):
        return dict(value)
    raise refused(shown(value), "a mapping whose keys are texts")


def _names(value: Any) -> dict[str, str]:
    return {key: _text(name) for key, name in _table(value).items()}


def _kernels(value: Any) -> str | dict[str, str]:
    return _names(value) if isinstance(value, Mapping) else _text(value)


def _switch(value: Any) -> Any:
    if isinstance(value, Mapping) and isinstance(value.get("name"), bool):
        return {**value, "name": _switch(value["name"])}
    if isinstance(value, bool):
        return "on" if value else "none"
    return value


Text = Annotated[str, PlainValidator(_text)]
"""Not empty."""
Place = Annotated[str, PlainValidator(_place)]
"""A path or another reference."""
OptionalText = Annotated[str | None, PlainValidator(_optional_text)]
"""`none` is None."""
Texts = Annotated[list[str], PlainValidator(_texts)]
Count = Annotated[int, whole(1)]
AutoCount = Annotated[int | Auto, whole(1, words=["auto"])]
AutoDepth = Annotated[int | Auto, whole(1, MAX_DEPTH, words=["auto"])]
AutoDraftNodes = Annotated[int | Auto, whole(1, MAX_DRAFT_NODES, words=["auto"])]
AutoThreads = Annotated[int | Auto, whole(1, MAX_THREADS, words=["auto"])]
Host = Annotated[str, PlainValidator(_host)]
"""A name or an address."""
Hosts = Annotated[list[str], PlainValidator(_hosts)]
"""Names or addresses, without ports."""
Seed = Annotated[
    int | None, whole(0, 2**64 - 1, words=["none"], span="a whole number, 0 to 2**64 - 1")
]
MaxStep = Annotated[
    int | Auto | None,
    whole(1, MAX_STEP_MS, words=["auto", "none"], span=f"whole milliseconds, 1 to {MAX_STEP_MS}"),
]
"""Milliseconds; `none` is None."""
Size = Annotated[int, PlainValidator(_size)]
"""Bytes."""
Memory = Annotated[int | float | Auto, PlainValidator(_memory)]
"""Bytes (an int), or a fraction (a float, at most 1.0)."""
ServedNames = Annotated[str | list[str], PlainValidator(_served_names)]
ApiKeys = Annotated[list[str] | None, PlainValidator(_api_keys)]
Table = Annotated[dict[str, Any], PlainValidator(_table)]
Names = Annotated[dict[str, str], PlainValidator(_names)]
Kernels = Annotated[str | dict[str, str], PlainValidator(_kernels)]
"""A name for all operations, or an operation to a name."""
switch = BeforeValidator(_switch)
"""YAML reads a bare `on` and `off` as true and false."""
