"""``check_file``: what passes, what is said of the rest, and that no misspelt key at any level gets through."""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from configs.loader import parse_mapping
from deployments.check import check_file, manifest_and_serve_problems, serve_problems

CONFIGS = Path(__file__).resolve().parents[2] / "configs"
LOCAL = CONFIGS / "local.yaml"
RAYSERVICE = CONFIGS / "kuberay" / "rayservice.yaml"
SERVE_TEXT = ("spec", "serveConfigV2")
#: The last key of the paths under which keys are a user's own names.
FREE_MAPS = {"labels", "annotations", "rayStartParams", "env_vars", "limits", "requests", "matchLabels"}

Location = tuple[Any, ...]


def key_locations(value: Any, location: Location = ()) -> Iterator[Location]:
    """Where each key stands, free-form maps left out."""
    if isinstance(value, dict):
        for key, item in value.items():
            if not (location and location[-1] in FREE_MAPS):
                yield (*location, key)
            yield from key_locations(item, (*location, key))
    elif isinstance(value, list):
        for number, item in enumerate(value):
            yield from key_locations(item, (*location, number))


def misspelt(value: Any, location: Location) -> tuple[Any, str]:
    """A copy with one key misspelt, and the new key."""
    changed = copy.deepcopy(value)
    place = changed
    for part in location[:-1]:
        place = place[part]
    key = location[-1]
    wrong = key[:-1] if len(key) > 3 else key + "x"
    items = [(wrong if name == key else name, item) for name, item in place.items()]
    place.clear()
    place.update(items)
    return changed, wrong


MANIFEST = parse_mapping(RAYSERVICE.read_text())
SERVE_IN_MANIFEST = parse_mapping(MANIFEST["spec"]["serveConfigV2"])
LOCAL_RAW = parse_mapping(LOCAL.read_text())
#: A Serve file that uses what the others do not.
FULL = {
    "proxy_location": "EveryNode",
    "target_capacity": 50,
    "http_options": {"host": "127.0.0.1", "root_path": "/x"},
    "grpc_options": {"port": 9000, "grpc_servicer_functions": []},
    "controller_options": {"runtime_env": {"env_vars": {"A": "1"}}},
    "logging_config": {"encoding": "JSON", "additional_log_standard_attrs": ["name"]},
    "applications": [
        {
            "name": "blockserve",
            "import_path": "deployments.app:build",
            "runtime_env": {"pip": {"packages": ["x"], "pip_check": False}, "env_vars": {"A": "1"}},
            "logging_config": {"log_level": "DEBUG"},
            "args": {
                "models": [{"name": "m", "path": "/m", "diffusion": {"steps": 4}, "sampling": {"top_k": 1}}]
            },
            "deployments": [
                {
                    "name": "Engine-m",
                    "max_ongoing_requests": 100,
                    "backpressure_config": {"status_code": 429},
                    "ray_actor_options": {"num_cpus": 1, "runtime_env": {"env_vars": {"B": "1"}}},
                    "logging_config": {"encoding": "JSON"},
                    "autoscaling_config": {
                        "min_replicas": 1,
                        "max_replicas": 2,
                        "policy": {
                            "policy_function": "deployments.autoscaling:QueueDepthPolicy",
                            "policy_kwargs": {"target": 8},
                        },
                    },
                    "request_router_config": {
                        "request_router_class": "router.request_router:RequestRouter",
                        "max_backoff_s": 0.5,
                    },
                },
                {"name": "Ingress", "num_replicas": 2, "max_replicas_per_node": 1},
            ],
        }
    ],
}


def test_the_shipped_files_are_fine() -> None:
    assert check_file(LOCAL) == []
    assert check_file(RAYSERVICE) == []


def test_a_full_serve_file_is_fine() -> None:
    assert serve_problems(FULL) == []


@pytest.mark.parametrize("raw", [LOCAL_RAW, SERVE_IN_MANIFEST, FULL], ids=["local", "rayservice", "full"])
def test_every_misspelt_key_of_a_serve_config_is_a_problem(raw: dict[str, Any]) -> None:
    locations = list(key_locations(raw))
    assert len(locations) > 20
    for location in locations:
        changed, wrong = misspelt(raw, location)
        problems = serve_problems(changed)
        # Of what stands below `pip`, Ray itself speaks.
        pattern = f"{wrong}: unknown key|runtime_env.*but got: .*'{wrong}'"
        assert any(re.search(pattern, problem) for problem in problems), location


def test_every_misspelt_key_of_the_manifest_is_a_problem() -> None:
    locations = list(key_locations(MANIFEST))
    assert len(locations) > 60
    for location in locations:
        changed, wrong = misspelt(MANIFEST, location)
        if location == ("kind",):
            continue  # see the next test
        problems = manifest_and_serve_problems(changed)
        assert any(f"{wrong}: unknown key" in problem for problem in problems), location


def test_every_misspelt_key_inside_the_manifests_text_is_a_problem() -> None:
    for location in key_locations(SERVE_IN_MANIFEST):
        serve, wrong = misspelt(SERVE_IN_MANIFEST, location)
        manifest = copy.deepcopy(MANIFEST)
        manifest["spec"]["serveConfigV2"] = yaml.safe_dump(serve)
        problems = manifest_and_serve_problems(manifest)
        assert any(p.startswith("spec.serveConfigV2.") and f"{wrong}: unknown key" in p for p in problems), (
            location
        )


def test_a_file_without_kind_is_a_serve_file(tmp_path: Path) -> None:
    changed, _ = misspelt(MANIFEST, ("kind",))
    path = tmp_path / "manifest.yaml"
    path.write_text(yaml.safe_dump(changed))
    assert any(
        problem == f"{path}: apiVersion: unknown key" or "apiVersion" in problem
        for problem in check_file(path)
    )


def changed_local(**app: Any) -> dict[str, Any]:
    raw = copy.deepcopy(LOCAL_RAW)
    raw["applications"][0].update(app)
    return raw


MODELS = LOCAL_RAW["applications"][0]["args"]["models"]


@pytest.mark.parametrize(
    ("raw", "part"),
    [
        ({}, "applications: this key is required"),
        ({"applications": []}, "applications: holds no application"),
        ({"applications": {}}, "applications"),
        ({"applications": [3]}, "applications[0]"),
        (changed_local(import_path="deployments.app:buidl"), "did you mean `deployments.app:build`?"),
        (changed_local(import_path="nonsense"), "import_path"),
        (changed_local(route_prefix="v1"), "applications[0].route_prefix: must start with `/`, got 'v1'"),
        (changed_local(args={}), "applications[0].args.models: this key is required"),
        (changed_local(args={"models": MODELS, "batching": {"max_batch_size": 0}}), "got 0"),
        (changed_local(runtime_env={"env_vars": {"A": 1}}), "runtime_env['env_vars'] must be of type"),
        (changed_local(runtime_env={"working_dir": "/tmp"}), "remote URIs"),
        (changed_local(deployments=[{"name": "Engine"}]), "must be one of Ingress, Engine-smollm2"),
        (changed_local(deployments=[{"name": "Ingress", "num_replicas": -1}]), "num_replicas"),
        (changed_local(deployments=[{"name": "Ingress", "max_queued_requests": 0}]), "max_queued_requests"),
        (
            changed_local(deployments=[{"name": "Ingress", "autoscaling_config": {"min_replicas": "x"}}]),
            "deployments[0].autoscaling_config.min_replicas: must be a valid integer",
        ),
        (
            changed_local(
                deployments=[
                    {
                        "name": "Ingress",
                        "autoscaling_config": {"policy": {"policy_function": "no.such:Policy"}},
                    }
                ]
            ),
            "deployments[0].autoscaling_config: No module named 'no'",
        ),
        (
            changed_local(autoscaling_policy={"policy_function": "no.such:Policy"}),
            "applications[0].autoscaling_policy: No module named 'no'",
        ),
        ({"http_options": {"port": "many"}, "applications": LOCAL_RAW["applications"]}, "http_options.port"),
        ({"proxy_location": "Everywhere", "applications": LOCAL_RAW["applications"]}, "proxy_location"),
        ({"applications": LOCAL_RAW["applications"] * 2}, "applications"),
    ],
)
def test_what_is_refused(raw: dict[str, Any], part: str) -> None:
    problems = serve_problems(raw)
    assert any(part in problem for problem in problems), problems
    assert all("\n" not in problem for problem in problems)


def test_the_input_is_not_changed() -> None:
    raw = copy.deepcopy(FULL)
    serve_problems(raw)
    assert raw == FULL


@pytest.mark.parametrize(
    ("text", "part"),
    [
        (None, "spec.serveConfigV2: this key is required"),
        ("a: [", "spec.serveConfigV2: line 1"),
        ("applications: []", "spec.serveConfigV2.applications: holds no application"),
        ({"applications": []}, "spec.serveConfigV2: must be a string"),
    ],
)
def test_serve_text_of_a_manifest(text: Any, part: str) -> None:
    manifest = copy.deepcopy(MANIFEST)
    manifest["spec"]["serveConfigV2"] = text
    (problem,) = manifest_and_serve_problems(manifest)
    assert part in problem


@pytest.mark.parametrize(
    "text", ["kind: RayService", "kind: RayService\nspec: 3", "kind: RayService\nspec: []"]
)
def test_broken_manifests(tmp_path: Path, text: str) -> None:
    path = tmp_path / "m.yaml"
    path.write_text(text)
    assert check_file(path)


def test_unreadable_files_are_problems(tmp_path: Path) -> None:
    assert "cannot be read" in check_file(tmp_path / "none.yaml")[0]
    recursive = tmp_path / "recursive.yaml"
    recursive.write_text("applications: &a [*a]\nkind: RayService\nspec: {serveConfigV2: x, a: *a}\n")
    assert check_file(recursive)
