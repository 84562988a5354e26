"""``blockserve check``: everything that can be said about a configuration file without running it.

Ray's loader ignores keys that it does not know, at every level of a Serve YAML file but a few, so a misspelt
``max_ongoing_request`` validates and does nothing. Here it is a problem, in the file's Serve part, in our
``args``, and in a KubeRay manifest around both.
"""

from __future__ import annotations

import copy
import difflib
import importlib
import inspect
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, get_args, get_origin

from pydantic import BaseModel, ValidationError
from ray.runtime_env import RuntimeEnv
from ray.serve.config import AutoscalingPolicy, RequestRouterConfig
from ray.serve.schema import ServeApplicationSchema, ServeDeploySchema

from configs.kuberay.manifest import KIND, manifest_problems
from configs.loader import (
    APP_IMPORT_PATH,
    ConfigError,
    application_configs,
    is_ours,
    join_path,
    model_in,
    parse_mapping,
    read_mapping,
    show,
    unknown_key,
    validation_problems,
)
from deployments.naming import INGRESS_NAME, deployment_names

#: Where a manifest holds its Serve config, as text.
SERVE_CONFIG_PATH = "spec.serveConfigV2"
#: Fields that Serve declares as plain mappings, and the model that it makes of them later.
LATE_MODELS: dict[tuple[type[BaseModel], str], type[BaseModel]] = {
    (ServeApplicationSchema, "autoscaling_policy"): AutoscalingPolicy,
}


def check_file(path: Path) -> list[str]:
    """The problems of a Serve YAML file or a KubeRay ``RayService`` manifest, a line each; empty means fine."""
    try:
        raw = read_mapping(path)
        problems = manifest_and_serve_problems(raw) if raw.get("kind") == KIND else serve_problems(raw)
    except ConfigError as error:
        problems = error.problems
    except RecursionError:
        problems = ["nested too deeply"]
    return [f"{path}: {problem}" for problem in problems]


def manifest_and_serve_problems(raw: Mapping[str, Any]) -> list[str]:
    """The manifest itself, and the Serve config that it holds as text."""
    problems = manifest_problems(raw)
    spec = raw.get("spec")
    text = spec.get("serveConfigV2") if isinstance(spec, dict) else None
    if text is None:
        return [*problems, f"{SERVE_CONFIG_PATH}: this key is required"]
    if not isinstance(text, str):
        return problems  # the schema has said so
    try:
        serve = parse_mapping(text)
    except ConfigError as error:
        return problems + [f"{SERVE_CONFIG_PATH}: {problem}" for problem in error.problems]
    return problems + serve_problems(serve, SERVE_CONFIG_PATH)


def serve_problems(raw: dict[str, Any], prefix: str = "") -> list[str]:
    """A Serve config: Serve's own validation, unknown keys at every level, and the ``args`` of our applications.
    ``prefix`` is where it stands in its file."""
    problems = list(_model_problems(ServeDeploySchema, raw, prefix))
    try:
        # A copy: Serve's validators write into what they are given.
        ServeDeploySchema.model_validate(copy.deepcopy(raw))
    except ValidationError as error:
        for problem in validation_problems(error, ServeDeploySchema, prefix, raw):
            # Some of Serve's models refuse unknown keys themselves.
            if problem not in problems:
                problems.append(problem)
    except Exception as error:  # validators meet types that they do not expect
        problems.append(_one_line(prefix or "the file", error))
    configs, args_problems = application_configs(raw, prefix)
    problems += args_problems

    applications = raw.get("applications")
    if not applications and not any("applications" in problem for problem in problems):
        problems.append(f"{join_path(prefix, 'applications')}: holds no application")
    for number, app in enumerate(applications if isinstance(applications, list) else ()):
        if not isinstance(app, dict):
            continue
        path = join_path(prefix, "applications", number)
        import_path, route = app.get("import_path"), app.get("route_prefix")
        if isinstance(route, str) and not route.startswith("/"):
            problems.append(f"{path}.route_prefix: must start with `/`, got {show(route)}")
        if not is_ours(app):
            if isinstance(import_path, str) and difflib.get_close_matches(
                import_path, [APP_IMPORT_PATH], 1, 0.8
            ):
                problems.append(
                    f"{path}.import_path: {show(import_path)} does not exist; did you mean `{APP_IMPORT_PATH}`?"
                )
            continue
        config = configs.get(str(app.get("name", "default")))
        if config is not None:
            problems += _override_problems(app, [INGRESS_NAME, *deployment_names(config)], path)
    return problems


def _override_problems(app: Mapping[str, Any], names: list[str], path: str) -> Iterator[str]:
    """Serve refuses an override of a deployment that does not exist, but only when it builds the application."""
    overrides = app.get("deployments")
    for number, override in enumerate(overrides if isinstance(overrides, list) else ()):
        name = override.get("name") if isinstance(override, dict) else None
        if isinstance(name, str) and name not in names:
            where = join_path(path, "deployments", number, "name")
            yield f"{where}: must be one of {', '.join(names)}, got {show(name)}"


def _model_problems(model: type[BaseModel], value: Any, path: str) -> Iterator[str]:
    """Unknown keys in ``value`` and below, and what Serve validates late or never."""
    if isinstance(value, list):
        for number, item in enumerate(value):
            yield from _model_problems(model, item, join_path(path, number))
        return
    if not isinstance(value, dict):
        return  # of the wrong type, which validation reports, or null
    for key, item in value.items():
        field = model.model_fields.get(key)
        where = join_path(path, key)
        if field is None:
            yield unknown_key(path, key, model.model_fields)
        elif key == "runtime_env":
            yield from _runtime_env_problems(item, where)
        else:
            late = LATE_MODELS.get((model, key))
            nested = late or model_in(field.annotation)
            if nested is None:
                continue
            unknown = list(_model_problems(nested, item, where))
            yield from unknown
            if not unknown and (late or _accepts_dict(field.annotation)):
                yield from _late_problems(nested, item, where)
    if model is AutoscalingPolicy:
        yield from _kwargs_problems(value, "policy_function", "policy_kwargs", "__init__", path)
    elif model is RequestRouterConfig:
        yield from _kwargs_problems(
            value, "request_router_class", "request_router_kwargs", "initialize_state", path
        )


def _late_problems(model: type[BaseModel], value: Any, path: str) -> Iterator[str]:
    """For a field that Serve also takes as an unvalidated mapping: what the model says when it is made."""
    for number, item in enumerate(value if isinstance(value, list) else [value]):
        where = join_path(path, number) if isinstance(value, list) else path
        if not isinstance(item, dict):
            continue
        try:
            model(**copy.deepcopy(item))
        except ValidationError as error:
            yield from validation_problems(error, model, where, item)
        except Exception as error:  # policies and routers are imported here
            yield _one_line(where, error)


def _accepts_dict(annotation: Any) -> bool:
    if annotation is dict or get_origin(annotation) is dict:
        return True
    return any(_accepts_dict(argument) for argument in get_args(annotation))


def _runtime_env_problems(value: Any, path: str) -> Iterator[str]:
    if not isinstance(value, dict):
        return
    known = [name for name in RuntimeEnv.known_fields if not name.startswith("_")]
    unknown = [unknown_key(path, key, known) for key in value if key not in known]
    yield from unknown
    if not unknown:
        try:
            RuntimeEnv(**copy.deepcopy(value))
        except Exception as error:
            yield _one_line(path, error)


def _kwargs_problems(
    value: Mapping[str, Any], target: str, kwargs: str, method: str, path: str
) -> Iterator[str]:
    """Keyword arguments that the named policy or router does not take; a wrong one fails in the controller."""
    given, name = value.get(kwargs), value.get(target)
    if not isinstance(name, str) or not isinstance(given, dict):
        return
    try:
        module, _, attribute = name.replace(":", ".").rpartition(".")
        module, _, attribute = name.replace(":", ".").rpartition(".")
        found = getattr(importlib.import_module(module), attribute)
        parameters = inspect.signature(getattr(found, method)).parameters
    except Exception:  # whatever cannot be imported is reported where Serve imports it
        return
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
        return
    allowed = [parameter for parameter in parameters if parameter != "self"]
    yield from (unknown_key(join_path(path, kwargs), key, allowed) for key in given if key not in allowed)


def _one_line(path: str, error: Exception) -> str:
    text = " ".join(str(error).split()) or type(error).__name__
    return f"{path}: {text}"
