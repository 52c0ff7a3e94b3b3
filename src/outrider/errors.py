"""Every error that Outrider raises on purpose, as one tree.

    OutriderError
    |-- ConfigError         an option is wrong: names the field and the fix
    |-- ModelError          a model cannot be found, read or supported
    |   |-- ChecksumError   a file is not what it should be
    |-- RequestError        this one request cannot be served; others go on
    |   |-- UnsupportedError  a field or combination that is refused, by name
    |   |-- PromptTooLongError
    |-- CapacityError       memory, pages, disk or queue space is not enough
    |-- DrafterError        a drafter failed: costs speed, never output
    |-- TransferError       a KV transfer failed: recomputed, or an error for that request alone

Messages are one line that says what is wrong and what to do about it.
"""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches


class OutriderError(Exception):
    """Base of the tree; catch this to catch all of Outrider's own errors."""


class ConfigError(OutriderError):
    """An option is unknown, out of range or in conflict; `field` names it."""

    def __init__(self, message: str, field: str | None = None) -> None:
        super().__init__(message)
        self.field = field

    @classmethod
    def unknown(cls, field: str, known: Iterable[str], where: str) -> ConfigError:
        """Refuse an unknown key and suggest the nearest known one."""
        names = sorted(known)
        near = get_close_matches(field, names, n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"known: {', '.join(names)}"
        return cls(f"unknown option {field!r} in {where}; {hint}", field)


class ModelError(OutriderError):
    """A model or one of its files cannot be found, read or supported."""


class ChecksumError(ModelError):
    """A file's content is not what the catalogue or index says."""


class RequestError(OutriderError):
    """One request cannot be served; `request_id` names it where it is known."""

    def __init__(self, message: str, request_id: str | None = None, field: str | None = None) -> None:
        super().__init__(message)
        self.request_id = request_id
        self.field = field


class UnsupportedError(RequestError):
    """A field or combination that this build refuses rather than ignores."""


class PromptTooLongError(RequestError):
    """The prompt does not fit the model's context; it is never cut silently."""


class CapacityError(OutriderError):
    """Not enough memory, pages, disk or queue space."""


class DrafterError(OutriderError):
    """A drafter failed. It costs speed, never output."""


class TransferError(OutriderError):
    """A KV transfer failed; what it carried is recomputed or its request ends with an error."""
