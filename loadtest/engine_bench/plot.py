"""The benchmark as a figure of two panels. Needs matplotlib."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from loadtest.engine_bench.summary import speed_figure


def write_plot(report: dict[str, Any], file: Path) -> None:
    """Speed over concurrency, and ratios (or, without a system to compare with, prefill time); the format follows from
    the file's suffix. Void and failed rows are left out."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    rows = [row for row in report["rows"] if row["status"] == "ok"]
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(11, 4.5), layout="constrained")
    speed = speed_figure(report["is_diffusion"])
    for system in report["systems"]:
        _line(left, [row for row in rows if row["system"] == system], speed, system)
    left.set_ylabel("tokens/s, end to end" if report["is_diffusion"] else "decode tokens/s")
    if report["against"]:
        for other in report["against"]:
            points = [
                (row["concurrency"], row["ratio"][other])
                for row in rows
                if row["system"] == "blockserve" and row["ratio"][other] is not None
            ]
            right.plot(*_columns(points), marker="o", label=f"blockserve / {other}")
        right.axhline(1.0, color="grey", linewidth=1, linestyle="--")
        right.set_ylabel("ratio of decode tokens/s")
    else:
        for system in report["systems"]:
            _line(right, [row for row in rows if row["system"] == system], "prefill_s", system)
        right.set_ylabel("seconds until every request has its first token")
    ticks = report["settings"]["concurrency"]
    for axes in (left, right):
        axes.set_xlabel("live requests")
        axes.set_xscale("log", base=2)
        axes.set_xticks(ticks, [str(tick) for tick in ticks])
        axes.set_ylim(bottom=0)
        axes.grid(alpha=0.3)
        if axes.get_legend_handles_labels()[0]:
            axes.legend()
    settings = report["settings"]
    figure.suptitle(
        f"{report['shape']}, {settings['dtype']}, {settings['threads']} threads, {settings['prompt_tokens']} prompt + "
        f"{settings['output_tokens']} new tokens\n{report['environment']['cpu']['model']}; median and range of "
        f"{settings['repeat']} rounds",
        fontsize=10,
    )
    figure.savefig(file, dpi=150)
    pyplot.close(figure)


def _line(axes: Any, rows: list[dict[str, Any]], name: str, label: str) -> None:
    rows = [row for row in rows if row["figures"][name] is not None]
    if not rows:
        return
    values = [row["figures"][name] for row in rows]
    medians = [value["median"] for value in values]
    errors = [
        [value["median"] - value["min"] for value in values],
        [value["max"] - value["median"] for value in values],
    ]
    axes.errorbar(
        [row["concurrency"] for row in rows], medians, yerr=errors, marker="o", capsize=3, label=label
    )


def _columns(points: list[tuple[int, float]]) -> tuple[list[int], list[float]]:
    return [x for x, _ in points], [y for _, y in points]
