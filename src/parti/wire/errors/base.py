"""The kinds of JetStream API errors; a code that nobody listed becomes one of them by its HTTP-like code."""

from __future__ import annotations

from typing import ClassVar

from parti.errors import Category, PartiError, TransientError


class ApiError(PartiError):
    """The server answered with an error of no known kind: look its code up and decide by hand."""

    err_code: ClassVar[int] = 0

    def __init__(self, message: str, *, code: int = 0, err_code: int = 0, description: str = "") -> None:
        super().__init__(message)
        self.code = code
        self.server_code = err_code
        self.description = description


class ApiRefused(ApiError):
    """The server refuses this request as it is: change the request or the stream's configuration."""

    category: ClassVar[Category] = Category.POLICY


class ApiDenied(ApiError):
    """The account or user may not do this: correct its permissions."""

    category: ClassVar[Category] = Category.POLICY


class ApiNotFound(ApiError):
    """What the request names does not exist: create it, or correct the name."""

    category: ClassVar[Category] = Category.NOT_FOUND


class ApiUnavailable(ApiError, TransientError):
    """The server cannot answer now: back off and try again."""

    category: ClassVar[Category] = Category.TRANSIENT
