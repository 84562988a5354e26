"""Names of an application's Serve deployments."""

from __future__ import annotations

import re

from configs.schema import BlockserveConfig

INGRESS_NAME = "Ingress"


def deployment_names(config: BlockserveConfig) -> list[str]:
    """A valid and unique Serve deployment name per model: letters, digits, dots and dashes."""
    names: list[str] = []
    for model in config.models:
        name = base = "Engine-" + re.sub(r"[^A-Za-z0-9.-]+", "-", model.name).strip("-")
        number = 2
        while name in names:
            name = f"{base}-{number}"
            number += 1
        names.append(name)
    return names
