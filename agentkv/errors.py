"""The one exception tree. Every error says what happened, what was kept and what to do.

`to_wire` and `from_wire` carry an error over HTTP without loss: a client raises the class the server raised.
"""

from __future__ import annotations

from typing import Any, ClassVar

__all__ = [
    "AgentkvError", "BadModel", "BadRequest", "Busy", "Cancelled", "Capacity", "Conflict", "ContextOverflow",
    "EngineFault", "OpenCalls", "OrphanResult", "StoreFault", "UnknownModel", "UnknownOption", "from_wire",
]  # fmt: skip


class AgentkvError(Exception):
    """Base of all errors that agentkv raises.

    kept: the turn the session stands at after the error, None where no session is involved.
    hint: what the caller can do about it.
    retry_after: seconds after which a retry can succeed, None where waiting does not help.
    details: extra named values of the class (they travel on the wire).
    """

    code: ClassVar[str] = "agentkv_error"
    http_status: ClassVar[int] = 500
    default_hint: ClassVar[str] = ""

    def __init__(
        self,
        message: str,
        *,
        kept: int | None = None,
        hint: str | None = None,
        retry_after: float | None = None,
        **details: Any,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.kept = kept
        self.hint = self.default_hint if hint is None else hint
        self.retry_after = retry_after
        self.details = details
        for name, value in details.items():
            setattr(self, name, value)

    def __str__(self) -> str:
        text = self.message
        if self.kept is not None:
            text += f" (session stands at turn {self.kept})"
        return f"{text}. {self.hint}" if self.hint else text

    def to_wire(self) -> dict[str, Any]:
        """The error as the `error` object of an OpenAI-style body."""
        wire: dict[str, Any] = {
            "message": str(self),
            "type": "invalid_request_error" if self.http_status < 500 else "server_error",
            "code": self.code,
            "param": self.details.get("param"),
            "agentkv": {
                "message": self.message,
                "kept": self.kept,
                "hint": self.hint,
                "retry_after": self.retry_after,
                "details": self.details,
            },
        }
        return wire


class BadRequest(AgentkvError):
    """The caller asked for something that cannot be done as asked; nothing was changed."""

    code = "bad_request"
    http_status = 400
    default_hint = "Correct it and try again; nothing was changed"


class UnknownOption(BadRequest):
    """An option, field or verb that does not exist or is not served."""

    code = "unknown_option"
    default_hint = "Check the spelling against docs/api.md"


class UnknownModel(BadRequest):
    """No model of that name or at that path."""

    code = "model_not_found"
    http_status = 404
    default_hint = "Name a Hugging Face directory or a .gguf file on this machine, or use the bundled 'micro'"


class BadModel(BadRequest):
    """The model directory or file cannot be served: missing or damaged files, unknown architecture, impossible memory plan."""

    code = "bad_model"
    default_hint = "Check it: a directory needs config.json, tokenizer.json and all safetensors; or use one .gguf file"


class OrphanResult(BadRequest):
    """A tool result for a call that was never made on this branch."""

    code = "orphan_result"
    default_hint = "Answer only calls in session.open_calls"


class OpenCalls(BadRequest):
    """The session has tool calls without results. Detail: ids."""

    code = "open_calls"
    http_status = 409
    default_hint = "Answer each with add_tool_result, or reject(call_id, reason)"


class Conflict(BadRequest):
    """A different result for a call that already has one."""

    code = "conflict"
    http_status = 409
    default_hint = "The first result stands; fork or roll back to change history"


class ContextOverflow(BadRequest):
    """The request does not fit the window. Details: logical, resident, limit, freeable (tokens)."""

    code = "context_length_exceeded"
    default_hint = "Prune with mode='rebuild', start a new session, or ask for fewer tokens"


class Busy(AgentkvError):
    """Another turn of this session or chain is running; it is not disturbed."""

    code = "busy"
    http_status = 409
    default_hint = "Wait for the running turn, cancel it, or fork"


class Capacity(AgentkvError):
    """The engine has no room: for now (retry_after is set) or ever (it is None)."""

    code = "capacity"
    http_status = 503
    default_hint = "Retry later, shorten the request, or give the engine more memory"


class Cancelled(AgentkvError):
    """The turn was cancelled and rolled back."""

    code = "cancelled"
    http_status = 499
    default_hint = "Generate again to continue from the last turn boundary"


class EngineFault(AgentkvError):
    """A fault inside the engine; the running turn was rolled back."""

    code = "engine_fault"
    default_hint = "The transcript is kept; generate again, and report it if it comes back"


class StoreFault(AgentkvError):
    """The database failed; what it had committed stays."""

    code = "store_fault"
    default_hint = "Check disk space and permissions of the database, then resume the session"


def _classes(root: type[AgentkvError]) -> dict[str, type[AgentkvError]]:
    found = {root.code: root}
    for child in root.__subclasses__():
        found.update(_classes(child))
    return found


def from_wire(error: dict[str, Any]) -> AgentkvError:
    """Rebuild the exception a server sent (the `error` object of its body); unknown codes give AgentkvError."""
    extra = error.get("agentkv") or {}
    cls = _classes(AgentkvError).get(str(error.get("code")), AgentkvError)
    return cls(
        extra.get("message") or str(error.get("message", "unknown error")),
        kept=extra.get("kept"),
        hint=extra.get("hint"),
        retry_after=extra.get("retry_after"),
        **(extra.get("details") or {}),
    )
