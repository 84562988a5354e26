"""Configuration files: what is read, and what an error says."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from configs.loader import ConfigError, load_file, parse_args, parse_mapping

ROOT = Path(__file__).resolve().parents[2]
MODEL = {"name": "m", "path": "/m"}


def problems_of(args: object) -> list[str]:
    with pytest.raises(ConfigError) as info:
        parse_args(args)
    return info.value.problems


def test_the_local_file() -> None:
    loaded = load_file(ROOT / "configs" / "local.yaml")
    assert loaded.raw["http_options"]["host"] == "127.0.0.1"
    (config,) = loaded.applications.values()
    assert [model.name for model in config.models] == ["smollm2-135m-instruct", "llada2-words"]


@pytest.mark.parametrize(
    ("args", "problem"),
    [
        (
            {"models": [MODEL | {"engine": {"max_num_seq": 8}}]},
            "args.models[0].engine.max_num_seq: unknown key; did you mean `max_num_seqs`?",
        ),
        (
            {"models": [MODEL], "zzzzzzz": 1},
            "args.zzzzzzz: unknown key; allowed are admission, batching, ingress, models, security",
        ),
        (
            {"models": [MODEL | {"engine": {"max_num_seqs": 0}}]},
            "args.models[0].engine.max_num_seqs: must be greater than or equal to 1, got 0",
        ),
        (
            {"models": [MODEL | {"engine": {"backend": "tensorrt"}}]},
            "args.models[0].engine.backend: must be 'torch' or 'vllm', got 'tensorrt'",
        ),
        ({"models": [{"name": "m"}]}, "args.models[0].path: this key is required"),
        ({}, "args.models: this key is required"),
        ({"models": [MODEL, MODEL]}, "args: `models`: the name 'm' is used more than once"),
        (
            {"models": [MODEL | {"autoscaling": {"min_replicas": 3, "max_replicas": 2}}]},
            "args.models[0].autoscaling: `min_replicas` (3) must not exceed `max_replicas` (2)",
        ),
    ],
)
def test_messages_name_path_rule_and_value(args: object, problem: str) -> None:
    assert problems_of(args) == [problem]


def test_every_problem_is_reported() -> None:
    assert len(problems_of({"models": [{"name": "", "engine": {"x": 1}}], "ingress": 3})) == 4


def test_a_long_value_is_cut() -> None:
    (problem,) = problems_of({"models": "x" * 10_000})
    assert len(problem) < 250


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("a: 1\nb: {c: 1, c: 2}\n", ["line 2, column 11", "`c`", "second time", "line 2"]),
        ("a: 1\na: 2\n", ["line 2, column 1", "`a`"]),
        ("a: [1, 2\nb: 3\n", ["line 2"]),
        ("a: 1\n\tb: 2\n", ["line 2"]),
        ("a: 1\n--- \nb: 2\n", ["single document"]),
        ("- a\n", ["top level must be a mapping"]),
        ("", ["top level must be a mapping, got None"]),
        ("a: \x00", ["special characters"]),
        ("? [1, 2]\n: 3\n? {a: b}\n: 4\n", ["unhashable"]),
        ("a: !!python/object:os.system {}\n", ["line 1", "could not determine a constructor"]),
        ("a: 2024-99-99\n", ["not usable YAML"]),
        ("[" * 5000, ["not usable YAML"]),
    ],
)
def test_yaml_errors_have_positions(text: str, parts: list[str]) -> None:
    with pytest.raises(ConfigError) as info:
        parse_mapping(text)
    (problem,) = info.value.problems
    assert [part for part in parts if part not in problem] == []


def test_merge_keys_may_override() -> None:
    text = "base: &base {a: 1, b: 2}\nchild:\n  <<: *base\n  a: 3\n"
    assert parse_mapping(text)["child"] == {"a": 3, "b": 2}


@given(st.text(alphabet="ab:{}[]-&*!? \n\t'\"|>#%1.", max_size=40))
def test_text_is_parsed_or_refused(text: str) -> None:
    try:
        value = parse_mapping(text)
    except ConfigError:
        return
    assert value == yaml.safe_load(text)


def test_unreadable_files(tmp_path: Path) -> None:
    binary = tmp_path / "binary.yaml"
    binary.write_bytes(b"a: \xff\xfe")
    for path, part in (
        (binary, "UTF-8"),
        (tmp_path, "cannot be read"),
        (tmp_path / "none", "cannot be read"),
    ):
        with pytest.raises(ConfigError, match=part):
            load_file(path)


def test_only_our_applications_are_parsed(tmp_path: Path) -> None:
    apps = [
        {"name": "other", "import_path": "else:app", "args": {"x": 1}},
        {"import_path": "deployments.app.build", "args": {"models": [MODEL]}},
    ]
    path = tmp_path / "c.yaml"
    path.write_text(yaml.safe_dump({"applications": apps}))
    assert list(load_file(path).applications) == ["default"]
    apps[1]["args"] = {"models": [MODEL], "batchin": {}}
    path.write_text(yaml.safe_dump({"applications": apps}))
    with pytest.raises(ConfigError, match=r"applications\[1\]\.args\.batchin: .*`batching`"):
        load_file(path)
