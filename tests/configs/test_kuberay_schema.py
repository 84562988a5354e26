"""The schema made from KubeRay's custom resource definition, and the rules beside it."""

from __future__ import annotations

import copy
from importlib import resources
from pathlib import Path
from typing import Any

import pytest
import yaml

from configs.kuberay.manifest import manifest_problems, strict
from configs.kuberay.trim_crd import trim

ROOT = Path(__file__).resolve().parents[2]
CRD = ROOT / "tests" / "data" / "kuberay" / "ray.io_rayservices.yaml"
MANIFEST = yaml.safe_load((ROOT / "configs" / "kuberay" / "rayservice.yaml").read_text())


def test_the_shipped_schema_is_made_from_the_definition() -> None:
    made = trim(yaml.load(CRD.read_text(), Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader)))
    assert resources.files("configs.kuberay").joinpath("rayservice_schema.json").read_text() == made
    assert len(made) < 200_000


def test_a_property_named_description_stays() -> None:
    crd = {"description": "x", "properties": {"description": {"type": "string", "description": "y"}}}
    version = {"name": "v1", "schema": {"openAPIV3Schema": {"properties": {"spec": crd}}}}
    assert trim({"spec": {"versions": [version]}}) == '{"properties":{"description":{"type":"string"}}}\n'


def test_the_manifest_is_fine() -> None:
    assert manifest_problems(MANIFEST) == []


def test_strict() -> None:
    schema = {
        "type": "object",
        "properties": {"a": {"type": "string", "default": ""}, "b": {"x-kubernetes-int-or-string": True}},
        "required": ["a", "b"],
    }
    assert strict(schema)["required"] == ["b"]
    assert strict(schema)["additionalProperties"] is False
    assert strict(schema)["properties"]["b"]["type"] == ["integer", "string"]
    assert "additionalProperties" not in strict(schema | {"x-kubernetes-preserve-unknown-fields": True})
    open_map = {"type": "object", "additionalProperties": {"type": "string"}}
    assert strict(open_map) == open_map


INCREMENTAL = {
    "type": "NewClusterWithIncrementalUpgrade",
    "clusterUpgradeOptions": {"gatewayClassName": "istio", "stepSizePercent": 25, "intervalSeconds": 60},
}
HEAD = "spec.rayClusterConfig.headGroupSpec"
GROUP = "spec.rayClusterConfig.workerGroupSpecs[0]"


def changed(path: str, value: Any) -> dict[str, Any]:
    """The manifest with ``value`` at a dotted path."""
    manifest = copy.deepcopy(MANIFEST)
    *parents, last = path.replace("[0]", ".0").split(".")
    place: Any = manifest
    for key in parents:
        place = place[int(key)] if isinstance(place, list) else place.setdefault(key, {})
    place[last] = value
    return manifest


@pytest.mark.parametrize(
    ("path", "value", "parts"),
    [
        ("apiVersion", "ray.io/v1alpha1", ["apiVersion", "'ray.io/v1'"]),
        ("metadata.name", "Blockserve", ["metadata.name", "'Blockserve'"]),
        ("metadata.name", "1a", ["metadata.name"]),
        ("metadata.name", "a" * 48, ["at most 47", "48"]),
        ("metadata.name", None, ["metadata.name: this key is required"]),
        ("metadata.labels", {"a": 1}, ["metadata.labels.a", "a string", "got 1"]),
        ("spec.rayClusterDeletionDelaySeconds", -1, ["at least 0"]),
        ("spec.rayClusterDeletionDelaySeconds", "900", ["an integer", "'900'"]),
        ("spec.rayClusterDeletionDelaySeconds", 2**31, ["at most 2147483647"]),
        ("spec.upgradeStrategy.type", "Rolling", ["spec.upgradeStrategy.type", "NewCluster", "'Rolling'"]),
        ("spec.upgradeStrategy", {"type": INCREMENTAL["type"]}, ["clusterUpgradeOptions", "required"]),
        ("spec.rayClusterConfig.upgradeStrategy", {"type": "Recreate"}, ["rayClusterConfig.upgradeStrategy"]),
        ("spec.rayClusterConfig.rayVersion", "2.51.0", ["rayVersion", "2.52", "2.51.0"]),
        ("spec.rayClusterConfig.rayVersion", None, ["rayVersion", "required"]),
        ("spec.rayClusterConfig.rayVersion", "latest", ["rayVersion", "'latest'"]),
        ("spec.rayClusterConfig.authOptions.enableK8sTokenAuth", True, ["enableK8sTokenAuth"]),
        ("spec.rayClusterConfig.authOptions.mode", "tokens", ["'disabled', 'token'", "'tokens'"]),
        (f"{HEAD}.headService", {"metadata": {"name": "x"}}, ["headService.metadata.name"]),
        (f"{HEAD}.template.spec.containers", [], ["at least one container"]),
        (f"{HEAD}.template.spec.restartPolicy", "Always", ["restartPolicy", "'Always'"]),
        (f"{HEAD}.resources", {"CPU": "1"}, ["not in both"]),
        (f"{HEAD}.rayStartParams.num-cpus", 0, ["num-cpus", "a string", "got 0"]),
        (f"{HEAD}.rayStartParams.labels", "a=b", ["labels"]),
        (f"{HEAD}.template.spec.containers[0].env", [{"name": "RAY_REDIS_ADDRESS"}], ["RAY_REDIS_ADDRESS"]),
        (f"{HEAD}.template.spec.containers[0].resources.limits.cpu", "2 cores", ["limits.cpu", "'2 cores'"]),
        (f"{HEAD}.template.spec.containers[0].image", 7, ["image", "a string", "got 7"]),
        (f"{GROUP}.minReplicas", 4, ["minReplicas", "at most maxReplicas (3)", "4"]),
        (f"{GROUP}.minReplicas", -1, ["at least 0"]),
        (f"{GROUP}.suspend", True, ["suspend"]),
        (f"{GROUP}.groupName", None, ["groupName: this key is required"]),
        (f"{GROUP}.template.spec.volumes[0].emptyDir.sizeLimit", "4Gb", ["sizeLimit", "'4Gb'"]),
    ],
)
def test_what_the_schema_and_the_operator_refuse(path: str, value: Any, parts: list[str]) -> None:
    (problem,) = manifest_problems(changed(path, value))
    assert [part for part in parts if part not in problem] == []


@pytest.mark.parametrize(
    ("option", "value", "part"),
    [
        ("maxSurgePercent", 101, "must be 0 to 100, got 101"),
        ("maxSurgePercent", 20, "at most maxSurgePercent (20), got 25"),
        ("stepSizePercent", -5, "must be 0 to 100, got -5"),
        ("intervalSeconds", 0, "greater than 0"),
        ("gatewayClassName", "", "gatewayClassName"),
        ("stepSizePercent", None, "stepSizePercent: this key is required"),
    ],
)
def test_incremental_upgrades(option: str, value: Any, part: str) -> None:
    manifest = changed("spec.upgradeStrategy", copy.deepcopy(INCREMENTAL))
    # maxSurgePercent has a default, so it may be absent though the definition lists it as required.
    assert manifest_problems(manifest) == []
    manifest["spec"]["upgradeStrategy"]["clusterUpgradeOptions"][option] = value
    (problem,) = manifest_problems(manifest)
    assert part in problem
    without_autoscaler = changed("spec.upgradeStrategy", INCREMENTAL)
    without_autoscaler["spec"]["rayClusterConfig"]["enableInTreeAutoscaling"] = False
    assert any("enableInTreeAutoscaling" in line for line in manifest_problems(without_autoscaler))


def test_replica_bounds_are_required_without_the_autoscaler() -> None:
    manifest = changed("spec.rayClusterConfig.enableInTreeAutoscaling", False)
    del manifest["spec"]["rayClusterConfig"]["workerGroupSpecs"][0]["maxReplicas"]
    (problem,) = manifest_problems(manifest)
    assert problem.startswith(f"{GROUP}.maxReplicas")


def test_nulls_count_as_absent() -> None:
    assert manifest_problems(changed(f"{GROUP}.template.metadata", None)) == []


def test_redis_credentials_stand_in_one_place() -> None:
    manifest = changed("spec.rayClusterConfig.gcsFaultToleranceOptions", {"redisAddress": "redis:6379"})
    assert manifest_problems(manifest) == []
    head = manifest["spec"]["rayClusterConfig"]["headGroupSpec"]
    head["template"]["spec"]["containers"][0]["env"] = [{"name": "REDIS_PASSWORD", "value": "x"}]
    head["rayStartParams"]["redis-password"] = "x"
    head["rayStartParams"]["redis-username"] = "x"
    manifest["metadata"]["annotations"] = {"ray.io/ft-enabled": "true"}
    assert len(manifest_problems(manifest)) == 4
