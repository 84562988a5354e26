"""Resources of replicas whose model is shared by several ranks."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from configs.schema import BlockserveConfig, ModelConfig
from deployments.app import _engine_deployment
from deployments.cli import needed_cpus


def model(size: int, device: str = "auto", **resources) -> ModelConfig:
    return ModelConfig.model_validate(
        {
            "name": "m",
            "path": "p",
            "engine": {"tensor_parallel_size": size, "device": device},
            "resources": resources,
            "autoscaling": {"min_replicas": 1, "max_replicas": 3},
        }
    )


def test_one_rank_needs_no_placement_group() -> None:
    config = _engine_deployment(model(1, num_cpus=2), "m")._replica_config
    assert config.placement_group_bundles is None
    assert config.ray_actor_options["num_cpus"] == 2


def test_every_rank_has_a_bundle() -> None:
    config = _engine_deployment(model(4, num_cpus=2, num_gpus=1), "m")._replica_config
    assert config.placement_group_bundles == [{"CPU": 2, "GPU": 1}] * 4
    assert config.placement_group_strategy == "PACK"
    assert config.ray_actor_options["num_cpus"] == 2
    assert config.ray_actor_options["num_gpus"] == 1
    assert (
        _engine_deployment(model(2, num_cpus=0.5), "m")._replica_config.placement_group_bundles
        == [{"CPU": 0.5}] * 2
    )


def test_vllm_puts_a_worker_on_the_gpu_of_every_bundle() -> None:
    tree = model(2, num_cpus=2, num_gpus=1).model_dump()
    tree["engine"]["backend"] = "vllm"
    config = _engine_deployment(ModelConfig.model_validate(tree), "m")._replica_config
    assert config.placement_group_bundles == [{"CPU": 2, "GPU": 1}] * 2
    # A GPU of the replica's own would leave none for the first worker.
    assert config.ray_actor_options["num_gpus"] == 0
    assert config.ray_actor_options["num_cpus"] == 2


def test_a_local_cluster_has_room_for_all_ranks() -> None:
    config = BlockserveConfig(models=(model(4, num_cpus=2),))
    assert needed_cpus({"app": config}) == 25  # 3 replicas x 4 ranks x 2, and the ingress


@pytest.mark.parametrize(
    ("size", "device", "resources", "message"),
    [
        (2, "cuda", {}, r"`resources\.num_gpus` must be at least 1 for each of the 2 ranks .* got 0"),
        (2, "auto", {"num_gpus": 0.5}, r"`resources\.num_gpus` must be at least 1 .* got 0\.5"),
        (2, "cpu", {"num_cpus": 0}, r"`resources\.num_cpus` must be above 0"),
        (0, "cpu", {}, "tensor_parallel_size"),
        (65, "cpu", {}, "tensor_parallel_size"),
    ],
)
def test_resources_that_cannot_work_are_named(size: int, device: str, resources: dict, message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        model(size, device, **resources)


def test_one_rank_may_share_a_gpu() -> None:
    assert model(1, "cuda", num_gpus=0.5).resources.num_gpus == 0.5
    assert model(2, "cuda", num_gpus=1, num_cpus=0).resources.num_gpus == 1
