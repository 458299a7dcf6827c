"""How numbers are written for people: one formatter a kind, used by reports, stories, figures and scenes alike."""

from __future__ import annotations

import math

__all__ = ["format_bytes", "format_count", "format_digits", "format_number", "format_probability", "plural"]

_BYTES = ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB"))
_COUNTS = ((1e12, "T"), (1e9, "B"), (1e6, "M"))


def format_bytes(n: int | float, *, digits: int = 3) -> str:
    """``digits`` significant digits in decimal units: 28991029248 -> "29.0 GB", 449369856 -> "449 MB"; below 1 kB exact."""
    return _scaled(n, _BYTES, space=" ", digits=digits) or f"{n:.0f} B"


def format_count(n: int | float, *, digits: int = 3) -> str:
    """Exact with commas below a million, then ``digits`` significant ones: 65536 -> "65,536", 2779484476000 -> "2.78T"."""
    return _scaled(n, _COUNTS, space="", digits=digits) or f"{n:,.0f}"


def format_probability(p: int | float) -> str:
    """As a percentage with one decimal: 0.9731 -> "97.3 %"; ends that are not exact say so: 0.9999 -> "> 99.9 %"."""
    if 0 < p < 0.0005:
        return "< 0.1 %"
    if 0.9995 <= p < 1:
        return "> 99.9 %"
    return f"{100 * p:.1f} %"


def format_number(x: int | float) -> str:
    """A plain number with two decimals, never "-0.00"."""
    return f"{round(float(x), 2) + 0.0:.2f}"


def format_digits(x: int | float, *, digits: int = 2) -> str:
    """A number of any size to ``digits`` significant digits: 138.6 -> "140", 0.1386 -> "0.14", 3.1e-7 -> "3.1·10⁻⁷"."""
    if x == 0 or not math.isfinite(x):
        return "0" if x == 0 else "not a number" if math.isnan(x) else "∞" if x > 0 else "−∞"
    mantissa, exponent = f"{x:.{digits - 1}e}".split("e")
    if not -3 <= int(exponent) < 6:
        return f"{mantissa}·10{str(int(exponent)).translate(str.maketrans('-0123456789', '⁻⁰¹²³⁴⁵⁶⁷⁸⁹'))}"
    return f"{float(f'{mantissa}e{exponent}'):,.{max(0, digits - 1 - int(exponent))}f}"


def plural(noun: str, n: int) -> str:
    """The noun as it follows a count: "row" after one, "rows" after any other."""
    return noun if n == 1 else f"{noun}s"


def _scaled(n: int | float, units: tuple[tuple[float, str], ...], *, space: str, digits: int) -> str | None:
    for size, unit in units:
        if round(abs(n) / size, digits) >= 1:  # 999.6 kB is written 1.00 MB, not 1000 kB
            x = n / size
            whole = len(str(int(float(f"{abs(x):.{digits}g}"))))  # digits before the point, once rounded
            return f"{x:,.{max(0, digits - whole)}f}{space}{unit}"
    return None
