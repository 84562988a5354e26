"""JSON schemas that clients send: bounded, well-formed, and without references that lead out of them."""

from __future__ import annotations

import functools
import json
from collections.abc import Iterator, Mapping
from decimal import Decimal
from typing import Any

from replicas.errors import InvalidRequestError

#: Bounds on one schema. Compiling one is at worst quadratic in the number of properties of an object, and a
#: `maxItems` is compiled into that many symbols.
MAX_CHARACTERS = 64 * 1024
MAX_VALUES = 10_000
MAX_NESTING = 64
MAX_TOTAL_COUNT = 20_000
#: `multipleOf` becomes an automaton of about that many states, in units of its last decimal place.
MAX_DIVISOR = 1000
_COUNTS = ("minItems", "maxItems", "minProperties", "maxProperties", "minContains", "maxContains")
#: Keywords whose values are data, not schemas.
_DATA = frozenset({"const", "default", "enum", "examples"})


def check_schema(schema: Mapping[str, Any], param: str) -> None:
    """Raises ``InvalidRequestError`` for a schema that is malformed, too large, nested too deeply, or that
    refers to something outside of it; ``param`` (a prefix of the error's) names where it was given.

    Slow for large schemas (a fifth of a millisecond per property): call it in a thread.
    """
    _check_bounds(schema, param)
    try:
        text = json.dumps(schema, allow_nan=False)
    except ValueError:
        raise _error(param, "holds a number that is not finite") from None
    if len(text) > MAX_CHARACTERS:
        raise _error(param, f"may have at most {MAX_CHARACTERS} characters, got {len(text)}")
    for keyword, value, path in _keywords(schema):
        if keyword == "$ref" and isinstance(value, str):
            _check_reference(schema, value, f"{param}{path}")
        if keyword == "multipleOf" and isinstance(value, int | float) and not isinstance(value, bool):
            _check_divisor(value, f"{param}{path}")
    if problem := _problem(text):
        raise _error(f"{param}{problem[0]}", f"is no valid JSON schema: {problem[1]}")


def _check_bounds(schema: Any, param: str) -> None:
    count = total = 0
    level = [schema]
    for depth in range(MAX_NESTING + 1):
        count += len(level)
        if count > MAX_VALUES:
            raise _error(param, f"may hold at most {MAX_VALUES} values")
        deeper: list[Any] = []
        for value in level:
            if isinstance(value, dict):
                deeper += value.values()
                for name in _COUNTS:
                    bound = value.get(name)
                    total += bound if isinstance(bound, int) and bound > 0 else 0
            elif isinstance(value, list):
                deeper += value
        if total > MAX_TOTAL_COUNT:
            raise _error(param, f"may ask for at most {MAX_TOTAL_COUNT} items, all bounds added, got {total}")
        if not deeper:
            return
        if depth == MAX_NESTING:
            raise _error(param, f"may be nested at most {MAX_NESTING} levels deep")
        level = deeper


def _keywords(value: Any, path: str = "") -> Iterator[tuple[str, Any, str]]:
    if isinstance(value, dict):
        for key, item in value.items():
            here = f"{path}.{key}"
            yield key, item, here
            if key not in _DATA:
                yield from _keywords(item, here)
    elif isinstance(value, list):
        for i, item in enumerate(value):
            yield from _keywords(item, f"{path}[{i}]")


def _check_divisor(value: float, param: str) -> None:
    digits = "".join(map(str, Decimal(repr(value)).normalize().as_tuple().digits))
    scale = max(0, int(Decimal(repr(value)).normalize().as_tuple().exponent))
    if int(digits) * 10 ** min(scale, 9) > MAX_DIVISOR:
        raise _error(
            param, f"may have a value of at most {MAX_DIVISOR} (decimal point left out), got {value}"
        )


def _check_reference(schema: Any, reference: str, param: str) -> None:
    if reference == "#":
        return
    if not reference.startswith("#/"):
        raise _error(param, f"must point into the schema itself (`#/...`), got {reference[:80]!a}")
    target = schema
    for part in reference[2:].split("/"):
        name = part.replace("~1", "/").replace("~0", "~")
        if isinstance(target, dict) and name in target:
            target = target[name]
        elif isinstance(target, list) and name.isdecimal() and int(name[:9]) < len(target):
            target = target[int(name)]
        else:
            raise _error(param, f"points to nothing: {reference[:80]!a}")


@functools.lru_cache(maxsize=256)
def _problem(text: str) -> tuple[str, str] | None:
    """What the metaschema says: (path, message). Draft 7's, because the later ones take ten times as long; what
    is new in those is checked when a grammar is made of the schema."""
    import jsonschema  # imported late: it takes a while

    validator = jsonschema.Draft7Validator(jsonschema.Draft7Validator.META_SCHEMA)
    try:
        error = next(validator.iter_errors(json.loads(text)), None)
    except RecursionError:
        return "", "nested too deeply"
    if error is None:
        return None
    path = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in error.absolute_path)
    return path[:200], str(error.message)[:200]


def _error(param: str, message: str) -> InvalidRequestError:
    return InvalidRequestError(f"`{param}`: {message}", param=param)
