"""From raw rounds to rows: medians and spreads, ratios, scaling, and which rows do not count."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

FIGURES = (
    "prefill_s",
    "prefill_tokens_per_s",
    "decode_tokens_per_s",
    "tokens_per_s",
    "total_s",
    "step_median_s",
)
DIFFUSION_FIGURES = ("forwards", "deciding_forwards", "commit_forwards", "tokens_per_forward")


def spread(values: Sequence[float | None]) -> dict[str, float] | None:
    """Median, least and greatest of what was measured; None when nothing was."""
    known = [value for value in values if value is not None]
    if not known:
        return None
    return {"median": statistics.median(known), "min": min(known), "max": max(known)}


def speed_figure(is_diffusion: bool) -> str:
    """The figure that ratios and scaling compare: block diffusion has no phase of decoding apart."""
    return "tokens_per_s" if is_diffusion else "decode_tokens_per_s"


def summarize(report: dict[str, Any]) -> dict[str, Any]:
    """``rows``, ``slots``, ``ttft``, ``mixed`` of a report that holds ``checks`` and ``rounds``, and ``ok``: whether no
    row is void, nothing failed and nothing is missing."""
    rows = [
        _row(report, system, concurrency)
        for system in report["systems"]
        for concurrency in report["settings"]["concurrency"]
    ]
    _compare(rows, speed_figure(report["is_diffusion"]), report["against"])
    ttft, mixed = _ttft(report)
    errors = [r for r in report["rounds"] if "error" in r["result"]]
    unchecked = [check for check in report["checks"].values() if check["error"] is not None]
    return {
        "rows": rows,
        "slots": _slots(report),
        "ttft": ttft,
        "mixed": mixed,
        "ok": not report["interrupted"]
        and not errors
        and not unchecked
        and all(row["status"] == "ok" for row in rows),
    }


def _results(report: dict[str, Any], system: str, task: str) -> list[dict[str, Any]]:
    return [r["result"] for r in report["rounds"] if (r["system"], r["task"]) == (system, task)]


def _row(report: dict[str, Any], system: str, concurrency: int) -> dict[str, Any]:
    row: dict[str, Any] = {"system": system, "concurrency": concurrency}
    check = report["checks"][system]
    results = _results(report, system, "throughput")
    failed = next((result["error"] for result in results if "error" in result), None)
    if check["error"] is not None:
        return row | {"status": "failed", "reason": f"{check['error']} (in the check of tokens)"}
    if str(concurrency) in check["void"]:
        return row | {"status": "void", "reason": check["void"][str(concurrency)]}
    if failed is not None:
        return row | {"status": "failed", "reason": failed}
    runs = [run for result in results for run in result["runs"] if run["concurrency"] == concurrency]
    names = [*FIGURES]
    if report["is_diffusion"]:
        names += DIFFUSION_FIGURES
        num_tokens = concurrency * report["settings"]["output_tokens"]
        for run in runs:
            # Per request and forward: what one pass over a block decides.
            run["tokens_per_forward"] = num_tokens / run["row_forwards"]
    figures = {name: spread([run[name] for run in runs]) for name in names}
    figures["peak_rss_bytes"] = spread([result["peak_rss_bytes"] for result in results])
    figures["load_s"] = spread([result["load_s"] for result in results])
    return row | {"status": "ok", "figures": figures}


def _compare(rows: list[dict[str, Any]], figure: str, against: Sequence[str]) -> None:
    """Adds ``scaling`` (over the same system at concurrency 1) and ``ratio`` (over each system of ``against`` at the
    same concurrency), both of medians; None where one side is missing."""
    speeds = {
        (row["system"], row["concurrency"]): row["figures"][figure]["median"]
        for row in rows
        if row["status"] == "ok" and row["figures"][figure] is not None
    }
    for row in rows:
        key = (row["system"], row["concurrency"])
        row["scaling"] = _ratio(speeds.get(key), speeds.get((row["system"], 1)))
        row["ratio"] = {
            other: _ratio(speeds.get(key), speeds.get((other, row["concurrency"]))) for other in against
        }


def _ratio(value: float | None, base: float | None) -> float | None:
    return None if value is None or not base else value / base


def _slots(report: dict[str, Any]) -> dict[str, Any] | None:
    results = [r for r in _results(report, "blockserve", "slots") if "error" not in r]
    pairs = [pair for result in results for pair in result["pairs"]]
    if not pairs:
        return None
    return {
        "slots": results[0]["slots"],
        "num_pairs": len(pairs),
        "step_ratio": spread([pair["many_step_s"] / pair["one_step_s"] for pair in pairs]),
        "total_ratio": spread([pair["many_total_s"] / pair["one_total_s"] for pair in pairs]),
    }


def _ttft(report: dict[str, Any]) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    rows, mixed = [], []
    for system in report["systems"]:
        results = [r for r in _results(report, system, "ttft") if "error" not in r]
        if not results:
            continue
        for index, first in enumerate(results[0]["ttft"]):
            values = [result["ttft"][index]["ttft_s"] for result in results]
            rows.append({"system": system, "prompt_tokens": first["prompt_tokens"], "ttft_s": spread(values)})
        runs = [result["mixed"] for result in results]
        entry: dict[str, Any] = {"system": system}
        for name in ("long", "short"):
            entry[name] = {key: spread([run[name][key] for run in runs]) for key in ("ttft_s", "end_s")}
        short_first = sum(run["short"]["end_s"] < run["long"]["end_s"] for run in runs)
        entry["short_ended_first"] = f"{short_first} of {len(runs)}"
        mixed.append(entry)
    return rows, mixed
