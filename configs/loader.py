"""Reading configuration files: YAML with positions in its errors, and our ``args`` with paths in theirs."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ValidationError

from configs.schema import BlockserveConfig

APP_IMPORT_PATH = "deployments.app:build"
#: Serve's name for an application without one.
DEFAULT_APP_NAME = "default"
#: Characters of a given value that a message shows.
MAX_SHOWN_VALUE = 80


class ConfigError(ValueError):
    """A file that cannot be used; ``problems`` holds one line for each thing to repair."""

    def __init__(self, problems: Sequence[str]) -> None:
        super().__init__("; ".join(problems))
        self.problems = list(problems)


@dataclass(frozen=True)
class LoadedFile:
    """``raw`` is the whole file; ``applications`` holds, by application name, those that are Blockserve's."""

    path: Path
    raw: dict[str, Any]
    applications: dict[str, BlockserveConfig]


def load_file(path: Path) -> LoadedFile:
    """Reads a Serve YAML file and validates the ``args`` of our applications in it.

    Raises ``ConfigError``. Serve's own keys are ``deployments.check``'s business.
    """
    raw = read_mapping(path)
    configs, problems = application_configs(raw)
    if problems:
        raise ConfigError(problems)
    return LoadedFile(path, raw, configs)


def application_configs(
    raw: dict[str, Any], prefix: str = ""
) -> tuple[dict[str, BlockserveConfig], list[str]]:
    """The configurations of our applications in a Serve config, and what is wrong with the others of ours.
    ``prefix`` is where the Serve config stands in its file."""
    configs: dict[str, BlockserveConfig] = {}
    problems: list[str] = []
    applications = raw.get("applications")
    for number, app in enumerate(applications if isinstance(applications, list) else ()):
        if not is_ours(app):
            continue
        path = join_path(prefix, "applications", number, "args")
        name = str(app.get("name", DEFAULT_APP_NAME))
        try:
            configs[name] = parse_args(app.get("args") or {}, path)
        except ConfigError as error:
            problems += error.problems
    return configs, problems


def is_ours(app: Any) -> bool:
    """Serve takes both ``module:attribute`` and ``module.attribute``."""
    if not isinstance(app, dict):
        return False
    return str(app.get("import_path")).replace(":", ".") == APP_IMPORT_PATH.replace(":", ".")


def parse_args(args: Any, path: str = "args") -> BlockserveConfig:
    """Validates what stands under ``args``. Raises ``ConfigError``: each problem names the field's path (behind
    ``path``), what is allowed and what was given."""
    try:
        return BlockserveConfig.model_validate(args)
    except ValidationError as error:
        raise ConfigError(validation_problems(error, BlockserveConfig, path)) from error


# --- YAML ---------------------------------------------------------------------------------------------------


def read_mapping(path: Path) -> dict[str, Any]:
    """A YAML file whose top level is a mapping. Raises ``ConfigError``."""
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ConfigError([f"not a UTF-8 text file ({error.reason} at byte {error.start})"]) from error
    except OSError as error:
        reason = (error.strerror or str(error)).lower()
        raise ConfigError([f"cannot be read: {reason}"]) from error
    return parse_mapping(text)


def parse_mapping(text: str) -> dict[str, Any]:
    """``text`` as a YAML mapping. Raises ``ConfigError`` with line and column; a key that stands twice in one
    mapping is an error, because YAML loaders silently keep the last."""
    try:
        value = yaml.load(text, Loader=_UniqueKeyLoader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = f"line {mark.line + 1}, column {mark.column + 1}: " if mark else ""
        raise ConfigError([where + " ".join(filter(None, [error.context, error.problem]))]) from error
    except yaml.YAMLError as error:
        raise ConfigError([" ".join(str(error).split())]) from error
    except (RecursionError, ValueError) as error:
        raise ConfigError([f"not usable YAML: {error}"]) from error
    if not isinstance(value, dict):
        raise ConfigError([f"the top level must be a mapping, got {show(value)}"])
    return value


class _UniqueKeyLoader(yaml.SafeLoader):
    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: dict[Any, int] = {}
        for key_node, _ in node.value:
            if not isinstance(key_node, yaml.ScalarNode) or key_node.tag == "tag:yaml.org,2002:merge":
                continue
            line = key_node.start_mark.line + 1
            if key_node.value in seen:
                raise yaml.constructor.ConstructorError(
                    problem=f"the key `{key_node.value}` stands here a second time"
                    f" (first in line {seen[key_node.value]})",
                    problem_mark=key_node.start_mark,
                )
            seen[key_node.value] = line
        return super().construct_mapping(node, deep)


# --- messages -----------------------------------------------------------------------------------------------


def validation_problems(
    error: ValidationError, model: type[BaseModel], path: str = "", raw: Any = None
) -> list[str]:
    """A pydantic error as lines of ``path.to.field: what is allowed, what was given``. ``raw`` is what was
    validated: parts of a location that are not in it (pydantic names a union's members there) are left out."""
    problems = []
    details = error.errors(include_url=False)
    for detail in details:
        location, kind = detail["loc"], detail["type"]
        if kind == "too_short" and any(other["loc"][:-1][: len(location)] == location for other in details):
            continue  # pydantic counts the valid items of a tuple; the invalid ones have lines of their own
        if kind == "extra_forbidden":
            parent = _model_at(model, location[:-1])
            allowed = parent.model_fields if parent is not None else ()
            problems.append(unknown_key(join_path(path, *location[:-1]), location[-1], allowed))
            continue
        if raw is not None and kind != "missing":
            location = _in_value(location, raw)
        where = join_path(path, *location)
        if kind == "missing":
            problems.append(f"{where}: this key is required")
        else:
            message = re.sub(r"^(Value|Assertion) error, ", "", detail["msg"])
            message = message.replace("Input should be", "must be", 1).replace("Input should", "must", 1)
            if kind == "model_type":
                message = "must be a mapping"
            message = message[:1].lower() + message[1:]
            silent = kind in ("value_error", "assertion_error") or _hides_input(model, location)
            given = "" if silent else f", got {show(detail['input'])}"
            problems.append(f"{where}: {message}{given}")
    return problems


def unknown_key(path: str, key: Any, allowed: Iterable[str]) -> str:
    """The line for a key that does not exist at ``path``, with the nearest of the ``allowed`` ones."""
    names = sorted(allowed)
    near = difflib.get_close_matches(str(key), names, n=1, cutoff=0.6)
    where = join_path(path, key)
    if near:
        return f"{where}: unknown key; did you mean `{near[0]}`?"
    return f"{where}: unknown key" + (f"; allowed are {', '.join(names)}" if 0 < len(names) <= 40 else "")


def join_path(prefix: str, *parts: Any) -> str:
    """``join_path("a", "b", 0, "c")`` is ``a.b[0].c``."""
    for part in parts:
        if isinstance(part, int):
            prefix += f"[{part}]"
        else:
            prefix += f".{part}" if prefix else str(part)
    return prefix


def show(value: Any) -> str:
    """A given value, short enough for a message."""
    text = repr(value)
    return text if len(text) <= MAX_SHOWN_VALUE else text[: MAX_SHOWN_VALUE - 3] + "..."


def _in_value(location: Sequence[Any], value: Any) -> tuple[Any, ...]:
    """The longest start of ``location`` that leads somewhere in ``value``."""
    for number, part in enumerate(location):
        try:
            value = value[part]
        except (KeyError, IndexError, TypeError):
            return tuple(location[:number])
    return tuple(location)


def _model_at(model: type[BaseModel], location: Sequence[Any]) -> type[BaseModel] | None:
    """The model class that a location inside ``model`` leads to; indices lead into a field's items."""
    found: type[BaseModel] | None = model
    for part in location:
        if isinstance(part, int):
            continue
        field = found.model_fields.get(part) if found is not None else None
        found = model_in(field.annotation) if field is not None else None
    return found


def _hides_input(model: type[BaseModel], location: Sequence[Any]) -> bool:
    """Whether a model on the way to ``location`` has ``hide_input_in_errors``."""
    parents = (_model_at(model, location[:end]) for end in range(len(location)))
    return any(parent is not None and parent.model_config.get("hide_input_in_errors") for parent in parents)


def model_in(annotation: Any) -> type[BaseModel] | None:
    """The pydantic model inside an annotation such as ``tuple[Model, ...]`` or ``Model | None``."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    for argument in getattr(annotation, "__args__", ()):
        found = model_in(argument)
        if found is not None:
            return found
    return None
