"""What a region keeps beside its inputs."""

from __future__ import annotations

from typing import Any


def check(policy: Any) -> None:
    """Refuse what is no policy.

    Raises:
        TypeError: ``policy`` is not known.
    """
    if policy is not None:
        raise TypeError(
            f"remat: unknown policy {policy!r}. The policy known so far is None: keep the inputs "
            "of the region and nothing else."
        )
