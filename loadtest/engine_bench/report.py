"""The benchmark as aligned plain text."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from loadtest.engine_bench.spec import MIXED_DELAY_S, MIXED_LONG_PROMPT, MIXED_OUTPUT, MIXED_SHORT_PROMPT

Cell = Callable[[dict[str, Any]], str]


def render(report: dict[str, Any]) -> str:
    """Settings, checks, and one table each for throughput, slots, TTFT and the mixed requests."""
    parts = [_heading(report), _checks(report), _main_table(report)]
    if report["interrupted"]:
        parts.append("INTERRUPTED: figures are of the runs until then.")
    problems = _problems(report)
    if problems:
        parts.append(problems)
    if report["slots"] is not None:
        parts.append(_slots(report["slots"]))
    if report["ttft"]:
        parts.append(_ttft_table(report))
    return "\n\n".join(parts)


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Columns as wide as their widest cell; the first one left-aligned, the others right-aligned."""
    widths = [max(len(row[i]) for row in [header, *rows]) for i in range(len(header))]

    def line(cells: Sequence[str]) -> str:
        aligned = [cells[0].ljust(widths[0])]
        aligned += [cell.rjust(width) for cell, width in zip(cells[1:], widths[1:], strict=True)]
        return "  ".join(aligned).rstrip()

    return "\n".join([line(header), "  ".join("-" * width for width in widths), *map(line, rows)])


def with_spread(value: dict[str, float] | None, scale: float = 1.0, digits: int = 1) -> str:
    """``median (min..max)``, ``-`` when nothing was measured."""
    if value is None:
        return "-"
    median, low, high = (f"{value[key] * scale:.{digits}f}" for key in ("median", "min", "max"))
    return f"{median} ({low}..{high})"


def _number(value: dict[str, float] | None, scale: float = 1.0, digits: int = 0) -> str:
    return "-" if value is None else f"{value['median'] * scale:.{digits}f}"


def _ratio(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def _heading(report: dict[str, Any]) -> str:
    settings, environment = report["settings"], report["environment"]
    flags = [name for name, present in environment["cpu"]["flags"].items() if present]
    versions = ", ".join(f"{name} {version}" for name, version in environment["versions"].items())
    lines = [
        f"{report['shape']} ({report['config']['architectures'][0]}), "
        + ", ".join(f"{name} {_plain(value)}" for name, value in settings.items()),
        f"{environment['cpu']['model']}, {environment['cpu']['cpus']} CPUs ({' '.join(flags) or '-'})",
        versions,
    ]
    return "\n".join(lines)


def _plain(value: Any) -> str:
    return ",".join(map(str, value)) if isinstance(value, list) else str(value)


def _checks(report: dict[str, Any]) -> str:
    lines = ["Tokens on a small checkpoint of this architecture in float32:"]
    for system, check in report["checks"].items():
        if check["error"] is not None:
            lines.append(f"  {system}: FAILED: {check['error']}")
            continue
        batched = "differ from" if any("solo run" in reason for reason in check["void"].values()) else "equal"
        line = f"  {system}: batched tokens {batched} solo tokens"
        if check["reference"] is not None:
            line += (
                f"; {check['reference']} {'to' if check['reference'] == 'equal' else 'from'} transformers'"
            )
        lines.append(line)
    return "\n".join(lines)


def _main_table(report: dict[str, Any]) -> str:
    columns: list[tuple[str, Cell]]
    if report["is_diffusion"]:
        columns = [
            ("tok/s", lambda f: with_spread(f["tokens_per_s"])),
            ("tokens/forward", lambda f: _number(f["tokens_per_forward"], digits=2)),
            ("forwards", lambda f: _number(f["forwards"])),
            ("deciding", lambda f: _number(f["deciding_forwards"])),
            ("commit only", lambda f: _number(f["commit_forwards"])),
            ("prefill s", lambda f: _number(f["prefill_s"], digits=3)),
        ]
    else:
        columns = [
            ("prefill s", lambda f: with_spread(f["prefill_s"], digits=3)),
            ("prefill tok/s", lambda f: _number(f["prefill_tokens_per_s"])),
            ("decode tok/s", lambda f: with_spread(f["decode_tokens_per_s"])),
        ]
    columns.append(("step ms", lambda f: _number(f["step_median_s"], 1000, 1)))
    last: list[tuple[str, Cell]] = [
        ("load s", lambda f: _number(f["load_s"], digits=1)),
        ("peak MiB", lambda f: _number(f["peak_rss_bytes"], 1 / 2**20)),
    ]
    live = "slots = live" if report["is_diffusion"] else "live"
    compared = ["scaling", *(f"x {other}" for other in report["against"])]
    header = ["system", live, *(name for name, _ in columns), *compared, *(name for name, _ in last)]
    rows = []
    for row in report["rows"]:
        cells = [row["system"], str(row["concurrency"])]
        if row["status"] == "ok":
            figures = row["figures"]
            cells += [cell(figures) for _, cell in columns]
            cells += [_ratio(row["scaling"]), *(_ratio(row["ratio"][other]) for other in report["against"])]
            cells += [cell(figures) for _, cell in last]
        else:
            cells += [row["status"].upper(), *["-"] * (len(header) - 3)]
        rows.append(cells)
    return table(header, rows)


def _problems(report: dict[str, Any]) -> str:
    lines = [
        f"{row['status'].upper()}: {row['system']}, {row['concurrency']} live: {row['reason']}"
        for row in report["rows"]
        if row["status"] != "ok"
    ]
    lines += [
        f"FAILED: {entry['system']}, {entry['task']}: {entry['result']['error']}"
        for entry in report["rounds"]
        if "error" in entry["result"] and entry["task"] != "throughput"
    ]
    return "\n".join(lines)


def _slots(slots: dict[str, Any]) -> str:
    return (
        f"One live request on {slots['slots']} slots over one on 1 slot, {slots['num_pairs']} pairs: "
        f"step {with_spread(slots['step_ratio'], digits=3)}, "
        f"whole request {with_spread(slots['total_ratio'], digits=3)}"
    )


def _ttft_table(report: dict[str, Any]) -> str:
    single = table(
        ["system", "prompt tokens", "TTFT s, alone"],
        [
            [row["system"], str(row["prompt_tokens"]), with_spread(row["ttft_s"], digits=3)]
            for row in report["ttft"]
        ],
    )
    mixed = table(
        ["system", "long TTFT s", "long end s", "short TTFT s", "short end s", "short ended first"],
        [
            [
                row["system"],
                *(
                    with_spread(row[name][key], digits=2)
                    for name in ("long", "short")
                    for key in ("ttft_s", "end_s")
                ),
                row["short_ended_first"],
            ]
            for row in report["mixed"]
        ],
    )
    about = (
        f"A prompt of {MIXED_LONG_PROMPT} tokens, {MIXED_DELAY_S:g} s later one of {MIXED_SHORT_PROMPT}; "
        f"{MIXED_OUTPUT} new tokens each. TTFT from the arrival of the request, end from the start of the run:"
    )
    return f"{single}\n\n{about}\n{mixed}"
