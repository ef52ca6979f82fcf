"""What can be wrong between the agent and the API server."""

from agent.model.errors import AgentError


class ApiError(AgentError):
    """The API server did not do what it was asked for. Try again later."""


class ApiUnreachable(ApiError):
    """It cannot be reached, or is silent."""


class ApiGarbled(ApiUnreachable):
    """What it says cannot be read, or is too much."""


class ApiRefused(ApiError):
    """It answered with an error. `retry_after_s` is how long it wants to be left alone, or 0."""

    def __init__(self, status: int, message: str, retry_after_s: float = 0.0) -> None:
        super().__init__(message)
        self.status = status
        self.retry_after_s = retry_after_s


UNAUTHORIZED, FORBIDDEN, NOT_FOUND, CONFLICT, GONE, INVALID = 401, 403, 404, 409, 410, 422
