"""The one error a launcher raises instead of computing."""

from __future__ import annotations


class KernelDeclined(ValueError):
    """The arguments are outside what a kernel was made for; the message names the reason in one clause."""
