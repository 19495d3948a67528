"""How long to wait before trying again.

A node's daemons that fail together must not come back together, and a fault that lasts must not fill the log.
"""

from __future__ import annotations

import random

__all__ = ["FIRST_SECONDS", "LONGEST_SECONDS", "retry_seconds"]

FIRST_SECONDS, LONGEST_SECONDS = 1.0, 60.0


def retry_seconds(attempt: int, spread: random.Random | None = None) -> float:
    """Seconds before attempt number ``attempt + 1``: 1, 2, 4 ... 60, each spread by 20 %."""
    factor = (spread or random.SystemRandom()).uniform(0.8, 1.2)
    return min(LONGEST_SECONDS, FIRST_SECONDS * 2.0 ** max(0, min(attempt, 16) - 1)) * factor
