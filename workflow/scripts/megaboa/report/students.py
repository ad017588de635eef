"""Student's t for 95% of both sides."""

from __future__ import annotations

# By degrees of freedom; beyond the table the normal distribution's is near enough.
_T = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131)
_NORMAL = 1.960


def t_value(count: int) -> float:
    """For the mean of so many values; of one nothing is known."""
    if count < 2:
        return float("nan")
    return _T[count - 2] if count - 2 < len(_T) else _NORMAL
