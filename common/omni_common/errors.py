"""One error type that carries what every surface needs: an HTTP status, a stable code, the field, the stage."""


class OmniError(Exception):
    """A request (or a process) cannot go on, for a reason that its owner should read.

    `status` is the HTTP status that fits when nothing was sent yet; 4xx means the input was wrong. `code` is stable and
    machine-readable (`queue_full`, `stage_lost`), `param` the JSON path of the field to blame (`audio.format`).
    """

    def __init__(
        self,
        message: str,
        *,
        status: int = 500,
        code: str = "internal_error",
        param: str | None = None,
        stage: str = "",
        retry_after_s: float = 0.0,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.status = status
        self.code = code
        self.param = param
        self.stage = stage
        self.retry_after_s = retry_after_s


def invalid(message: str, param: str | None = None, *, code: str = "invalid_value", status: int = 400) -> OmniError:
    """The client's input is wrong: `param` names the field."""
    return OmniError(message, status=status, code=code, param=param)
