"""What tests of scheduling do with scheduled rows, without a model."""


def advance(rows, token=1):
    """What a forward does to the states."""
    for scheduled in rows:
        row = scheduled.state.prepare(scheduled.num_tokens)
        scheduled.state.apply(row, [token] * len(row.decide), [0.0] * len(row.decide))


def plan(rows):
    return [(row.state.request_id, row.num_tokens) for row in rows]
