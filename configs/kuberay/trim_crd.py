"""Makes ``rayservice_schema.json`` from KubeRay's custom resource definition.

``python -m configs.kuberay.trim_crd ray.io_rayservices.yaml > configs/kuberay/rayservice_schema.json``
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import yaml

VERSION = "v1"


def trim(crd: dict[str, Any]) -> str:
    """The JSON text of the ``spec`` schema of API version v1, without descriptions and ``status``."""
    versions = {version["name"]: version for version in crd["spec"]["versions"]}
    schema = versions[VERSION]["schema"]["openAPIV3Schema"]
    trimmed = _without_descriptions(schema["properties"]["spec"])
    return json.dumps(trimmed, separators=(",", ":"), sort_keys=True) + "\n"


def _without_descriptions(schema: Any) -> Any:
    """A schema's own ``description``; a property of that name stays."""
    if isinstance(schema, list):
        return [_without_descriptions(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    return {
        key: (
            {name: _without_descriptions(child) for name, child in value.items()}
            if key == "properties"
            else _without_descriptions(value)
        )
        for key, value in schema.items()
        if not (key == "description" and isinstance(value, str))
    }


def main(path: Path) -> None:
    sys.stdout.write(trim(yaml.safe_load(path.read_text(encoding="utf-8"))))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
