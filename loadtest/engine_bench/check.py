"""Whether a system's tokens are right: a batch gives what each request gives alone, and that is the reference's."""

from __future__ import annotations

from typing import Any


def check_system(
    answer: dict[str, Any], system: str, reference: dict[str, Any] | None = None
) -> dict[str, Any]:
    """Judges a worker's ``check`` result.

    Returns ``error`` (None, or why there are no tokens), ``void`` (concurrency as a string -> what differs; such a row
    does not count), ``reference`` (``equal``, ``differ``, or None for the reference itself and where there is none),
    ``solo`` and ``batched`` (the tokens), and ``distinct`` (different token sequences among the requests alone: a check
    on equal sequences would see little).
    """
    if "error" in answer:
        return {
            "error": answer["error"],
            "log": answer.get("log", ""),
            "void": {},
            "reference": None,
            "solo": None,
            "batched": None,
            "distinct": 0,
        }
    solo = answer["solo"]
    void = {}
    for concurrency, tokens in answer["batched"].items():
        wrong = [index for index, row in enumerate(tokens) if row != solo[index]]
        if wrong:
            position = first_difference(tokens[wrong[0]], solo[wrong[0]])
            void[concurrency] = (
                f"{len(wrong)} of {len(tokens)} requests differ from their own solo run "
                f"(request {wrong[0]} from token {position})"
            )
    comparison = None
    if reference is not None and reference["solo"] is not None and system != "transformers":
        wrong = [index for index, row in enumerate(solo) if row != reference["solo"][index]]
        comparison = "differ" if wrong else "equal"
        if wrong:
            reason = f"{len(wrong)} of {len(solo)} solo runs differ from transformers'"
            void = {concurrency: void.get(concurrency, reason) for concurrency in answer["batched"]}
    return {
        "error": None,
        "void": void,
        "reference": comparison,
        "solo": solo,
        "batched": answer["batched"],
        "distinct": len({tuple(row) for row in solo}),
    }


def first_difference(left: list[int], right: list[int]) -> int:
    """Index of the first token that differs; the shorter length when one is a prefix of the other."""
    for index, (a, b) in enumerate(zip(left, right, strict=False)):
        if a != b:
            return index
    return min(len(left), len(right))
