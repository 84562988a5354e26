"""Errors of engines and replicas. Picklable, and free of HTTP: the ingress maps them to statuses."""

from __future__ import annotations

from replicas.protocol import RequestError


class BlockserveError(Exception):
    """Base of all errors that a caller may see.

    ``code`` is stable and machine-readable, ``param`` the request field at fault (None when there is none),
    ``retryable`` whether the same request may succeed on another replica or later.
    """

    code = "internal_error"
    retryable = False

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        if code is not None:
            self.code = code

    def __reduce__(self):
        # Exception's own __reduce__ drops keyword-only arguments.
        return _rebuild, (type(self), self.message, self.param, self.code, self.__dict__.copy())

    def to_request_error(self) -> RequestError:
        return RequestError(self.code, self.message, self.param, self.retryable)


def _rebuild(
    cls: type[BlockserveError], message: str, param: str | None, code: str, state: dict
) -> BlockserveError:
    error = cls.__new__(cls)
    Exception.__init__(error, message)
    error.message, error.param, error.code = message, param, code
    error.__dict__.update(state)
    return error


class InvalidRequestError(BlockserveError):
    """The request can never run as it is; ``param`` names the field."""

    code = "invalid_request"


class ContextLengthExceededError(InvalidRequestError):
    """Prompt (and new tokens) do not fit the context; the message names both numbers."""

    code = "context_length_exceeded"


class UnsupportedParameterError(InvalidRequestError):
    """A valid field that this engine or model cannot honour."""

    code = "unsupported_parameter"


class ModelNotFoundError(BlockserveError):
    """No such model in this application."""

    code = "model_not_found"


class QueueFullError(BlockserveError):
    """Admission refused; try again after ``retry_after_s`` seconds."""

    code = "queue_full"
    retryable = True

    def __init__(self, message: str, *, retry_after_s: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class ModelNotReadyError(BlockserveError):
    """The model is loading, or no replica of it is up."""

    code = "model_not_ready"
    retryable = True


class SlowConsumerError(BlockserveError):
    """A client read its stream too slowly; its bounded mailbox overflowed."""

    code = "slow_consumer"


class DeadlineExceededError(BlockserveError):
    """The request's deadline passed."""

    code = "deadline_exceeded"


class StepFailedError(BlockserveError):
    """A fault in an engine step; it failed the requests of that step only."""

    code = "engine_step_failed"


class ReplicaLostError(BlockserveError):
    """The replica that ran the request died after it had emitted tokens."""

    code = "replica_lost"
    retryable = True


class EngineDeadError(BlockserveError):
    """The engine cannot serve any more; the replica must be replaced."""

    code = "engine_dead"
    retryable = True


class ModelLoadError(BlockserveError):
    """A checkpoint or configuration that cannot be served; the message says what and why."""

    code = "model_load_failed"


class SlotError(BlockserveError):
    """Misuse of the slot API: unknown or duplicate request, or no free slot."""

    code = "slot_error"


class SlotsExhaustedError(SlotError):
    """No free slot."""

    code = "slots_exhausted"
