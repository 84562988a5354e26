"""The download cache: built once, whole or not at all, whoever else is at it."""

from __future__ import annotations

import multiprocessing
import time
from pathlib import Path

import pytest

from replicas.demo.cache import DemoModelError, build_once, default_cache_dir, file_lock

FILES = ("a", "b")


def fill(folder: Path) -> None:
    for name in FILES:
        (folder / name).write_text(name)


def build_slowly(root: str, started: float) -> None:
    def build(folder: Path) -> None:
        with (Path(root) / "builds").open("a") as log:
            log.write("x")
        (folder / "a").write_text("a")
        time.sleep(0.5)
        (folder / "b").write_text("b")

    time.sleep(max(0.0, started - time.time()))
    target = build_once(Path(root) / "model", FILES, build)
    assert all((target / name).is_file() for name in FILES)


def test_processes_at_once_build_once(tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    started = time.time() + 2
    processes = [context.Process(target=build_slowly, args=(str(tmp_path), started)) for _ in range(3)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(60)
    assert [process.exitcode for process in processes] == [0, 0, 0]
    assert (tmp_path / "builds").read_text() == "x"


def test_target_appears_whole(tmp_path: Path) -> None:
    target = tmp_path / "deep" / "model"

    def build(folder: Path) -> None:
        assert folder != target
        assert folder.parent == target.parent
        fill(folder)
        assert not target.exists()

    assert build_once(target, FILES, build) == target
    assert (target / "b").read_text() == "b"


def test_finished_target_is_not_built_again(tmp_path: Path) -> None:
    build_once(tmp_path / "model", FILES, fill)

    def build(folder: Path) -> None:
        raise AssertionError("built twice")

    assert build_once(tmp_path / "model", FILES, build) == tmp_path / "model"


def test_failed_build_leaves_nothing_and_the_next_one_works(tmp_path: Path) -> None:
    def build(folder: Path) -> None:
        (folder / "a").write_text("half")
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        build_once(tmp_path / "model", FILES, build)
    assert [p.name for p in tmp_path.iterdir()] == [".model.lock"]
    assert (build_once(tmp_path / "model", FILES, fill) / "a").read_text() == "a"


def test_build_that_forgets_a_file_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(DemoModelError, match="did not write b"):
        build_once(tmp_path / "model", FILES, lambda folder: (folder / "a").touch() or None)
    assert not (tmp_path / "model").exists()


def test_damaged_or_older_target_is_replaced(tmp_path: Path) -> None:
    target = build_once(tmp_path / "model", FILES, fill)
    (target / "b").unlink()
    (target / "stray").touch()
    build_once(target, FILES, fill)
    assert (target / "b").is_file()
    assert not (target / "stray").exists()
    (target / "stray").touch()
    build_once(target, FILES, fill, version="2")
    assert not (target / "stray").exists()


def test_left_over_of_a_killed_process_is_removed(tmp_path: Path) -> None:
    (tmp_path / ".model-killed").mkdir()
    (tmp_path / ".model-killed" / "a").touch()
    (tmp_path / ".other-model").mkdir()
    build_once(tmp_path / "model", FILES, fill)
    assert not (tmp_path / ".model-killed").exists()
    assert (tmp_path / ".other-model").exists()


def hold(path: str, held: object, seconds: float) -> None:
    with file_lock(Path(path)):
        held.set()  # type: ignore[attr-defined]
        time.sleep(seconds)


def test_lock_waits_for_the_other_process(tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    held = context.Event()
    process = context.Process(target=hold, args=(str(tmp_path / "lock"), held, 1.0))
    process.start()
    assert held.wait(60)
    began = time.monotonic()
    with file_lock(tmp_path / "lock"):
        waited = time.monotonic() - began
    process.join(60)
    assert waited > 0.5


def test_cache_folder_is_read_from_the_environment_at_every_call(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BLOCKSERVE_CACHE", str(tmp_path))
    assert default_cache_dir() == tmp_path
    monkeypatch.setenv("BLOCKSERVE_CACHE", "")
    monkeypatch.setenv("HOME", "/somewhere")
    assert default_cache_dir() == Path("/somewhere/.cache/blockserve")
    monkeypatch.setenv("BLOCKSERVE_CACHE", "~/own")
    assert default_cache_dir() == Path("/somewhere/own")
