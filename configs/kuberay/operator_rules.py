"""What KubeRay's operator refuses although the custom resource definition allows it.

Source: ``ray-operator/controllers/ray/utils/validation.go`` and ``constant.go`` of KubeRay v1.7. A refused manifest
is accepted by the API server and then never becomes ready, with the reason in an event only.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from packaging.version import InvalidVersion, Version

from configs.loader import join_path, show

#: Operator and services append to the name; a label of DNS holds 63 characters.
MAX_NAME_LENGTH = 47
DNS_1035_LABEL = re.compile(r"[a-z]([-a-z0-9]*[a-z0-9])?")
UPGRADE_TYPES = ("NewCluster", "NewClusterWithIncrementalUpgrade", "None")
INCREMENTAL = "NewClusterWithIncrementalUpgrade"
MIN_VERSION_FOR_TOKEN_AUTH = Version("2.52.0")
CLUSTER = "spec.rayClusterConfig"


def operator_problems(raw: Mapping[str, Any]) -> list[str]:
    """The problems of a manifest that its schema allows, a line each."""
    cluster = _get(raw, "spec", "rayClusterConfig", default={})
    return [
        *_name(raw),
        *_upgrade(raw),
        *_groups(cluster),
        *_auth(cluster),
        *_gcs_fault_tolerance(raw, cluster),
    ]


def _name(raw: Mapping[str, Any]) -> Iterator[str]:
    name = _get(raw, "metadata", "name", default=None)
    if name is None:
        yield "metadata.name: this key is required"
    elif len(name) > MAX_NAME_LENGTH:
        yield f"metadata.name: must have at most {MAX_NAME_LENGTH} characters, got {len(name)}"
    elif not DNS_1035_LABEL.fullmatch(name):
        yield (
            "metadata.name: must be lower case letters, digits and dashes, start with a letter and not end with a"
            f" dash, got {show(name)}"
        )


def _upgrade(raw: Mapping[str, Any]) -> Iterator[str]:
    if _get(raw, "spec", "rayClusterConfig", "upgradeStrategy", "type", default=None) is not None:
        yield f"{CLUSTER}.upgradeStrategy: cannot be set in a RayService; spec.upgradeStrategy can"
    path = "spec.upgradeStrategy"
    kind = _get(raw, "spec", "upgradeStrategy", "type", default=None)
    if kind is not None and kind not in UPGRADE_TYPES:
        yield f"{path}.type: must be one of {', '.join(UPGRADE_TYPES)}, got {show(kind)}"
    if kind != INCREMENTAL:
        return
    if not _get(raw, "spec", "rayClusterConfig", "enableInTreeAutoscaling", default=False):
        yield f"{CLUSTER}.enableInTreeAutoscaling: must be true for {INCREMENTAL}"
    options = _get(raw, "spec", "upgradeStrategy", "clusterUpgradeOptions", default=None)
    path += ".clusterUpgradeOptions"
    if options is None:
        yield f"{path}: this key is required for {INCREMENTAL}"
        return
    surge, step = options.get("maxSurgePercent", 100), options["stepSizePercent"]
    for name, value in (("maxSurgePercent", surge), ("stepSizePercent", step)):
        if not 0 <= value <= 100:
            yield f"{path}.{name}: must be 0 to 100, got {value}"
    if step > surge:
        yield f"{path}.stepSizePercent: must be at most maxSurgePercent ({surge}), got {step}"
    if options["intervalSeconds"] <= 0:
        yield f"{path}.intervalSeconds: must be greater than 0, got {options['intervalSeconds']}"
    if not options["gatewayClassName"]:
        yield f"{path}.gatewayClassName: must not be empty"


def _groups(cluster: Mapping[str, Any]) -> Iterator[str]:
    autoscaling = bool(cluster.get("enableInTreeAutoscaling"))
    autoscaler_v2 = autoscaling and _get(cluster, "autoscalerOptions", "version", default="v1") == "v2"
    head = cluster.get("headGroupSpec") or {}
    head_path = f"{CLUSTER}.headGroupSpec"
    if _get(head, "headService", "metadata", "name", default=""):
        yield f"{head_path}.headService.metadata.name: must not be set"
    idle = _get(cluster, "autoscalerOptions", "idleTimeoutSeconds", default=0)
    if idle < 0:
        yield f"{CLUSTER}.autoscalerOptions.idleTimeoutSeconds: must be at least 0, got {idle}"
    groups = cluster.get("workerGroupSpecs") or []
    all_groups = [(head_path, head)]
    for number, group in enumerate(groups):
        path = join_path(CLUSTER, "workerGroupSpecs", number)
        all_groups.append((path, group))
        low, high = group.get("minReplicas"), group.get("maxReplicas")
        for name, value in (("minReplicas", low), ("maxReplicas", high)):
            if value is None and not autoscaling:
                yield f"{path}.{name}: this key is required when enableInTreeAutoscaling is not true"
            elif value is not None and value < 0:
                yield f"{path}.{name}: must be at least 0, got {value}"
        if low is not None and high is not None and low > high:
            yield f"{path}.minReplicas: must be at most maxReplicas ({high}), got {low}"
        if autoscaling and group.get("suspend"):
            yield f"{path}.suspend: must not be true with the autoscaler"
    for path, group in all_groups:
        pod = _get(group, "template", "spec", default={})
        if not pod.get("containers"):
            yield f"{path}.template.spec.containers: must hold at least one container"
        if autoscaler_v2 and pod.get("restartPolicy", "Never") != "Never":
            yield f"{path}.template.spec.restartPolicy: must be Never with autoscaler v2, got {pod['restartPolicy']!r}"
        start = group.get("rayStartParams") or {}
        if group.get("resources") and {"num-cpus", "num-gpus", "memory", "resources"} & set(start):
            yield f"{path}: resources must stand in `resources` or in `rayStartParams`, not in both"
        if "labels" in start:
            yield f"{path}.rayStartParams.labels: must stand in the group's `labels`"


def _auth(cluster: Mapping[str, Any]) -> Iterator[str]:
    auth = cluster.get("authOptions") or {}
    if auth.get("enableK8sTokenAuth"):
        yield f"{CLUSTER}.authOptions.enableK8sTokenAuth: not supported for a RayService"
    if auth.get("mode") != "token":
        return
    path, version = f"{CLUSTER}.rayVersion", cluster.get("rayVersion")
    if not version:
        yield f"{path}: this key is required with authOptions.mode `token`"
        return
    try:
        too_old = Version(version) < MIN_VERSION_FOR_TOKEN_AUTH
    except InvalidVersion:
        yield f"{path}: must be a version such as 2.60.0, got {show(version)}"
        return
    if too_old:
        yield f"{path}: must be at least {MIN_VERSION_FOR_TOKEN_AUTH} for token authentication, got {version}"


def _gcs_fault_tolerance(raw: Mapping[str, Any], cluster: Mapping[str, Any]) -> Iterator[str]:
    options = cluster.get("gcsFaultToleranceOptions")
    head = cluster.get("headGroupSpec") or {}
    containers: Sequence[Any] = _get(head, "template", "spec", "containers", default=[])
    env = {variable["name"] for variable in (containers[0].get("env") or [])} if containers else set()
    start = head.get("rayStartParams") or {}
    annotations = _get(raw, "metadata", "annotations", default={})
    path = f"{CLUSTER}.gcsFaultToleranceOptions"
    instead = f"use {path} instead"
    if "redis-username" in start or "REDIS_USERNAME" in env:
        yield f"{path}.redisUsername: the user of Redis must stand here, not with the head"
    if options is None:
        if "RAY_REDIS_ADDRESS" in env and annotations.get("ray.io/ft-enabled") != "true":
            yield f"{CLUSTER}.headGroupSpec: RAY_REDIS_ADDRESS must not be set; {instead}"
        return
    for name in sorted({"REDIS_PASSWORD", "RAY_REDIS_ADDRESS"} & env):
        yield f"{CLUSTER}.headGroupSpec: {name} must not be set; {instead}"
    if "redis-password" in start:
        yield f"{CLUSTER}.headGroupSpec.rayStartParams.redis-password: must not be set; {instead}"
    for name in ("ray.io/ft-enabled", "ray.io/external-storage-namespace"):
        if annotations.get(name):
            yield f"metadata.annotations: {name} must not be set; {instead}"


def _get(value: Any, *keys: str, default: Any) -> Any:
    """``value[a][b]``, or the default where a step is absent or null."""
    for key in keys:
        value = value.get(key) if isinstance(value, Mapping) else None
        if value is None:
            return default
    return value
