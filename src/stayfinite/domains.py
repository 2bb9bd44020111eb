"""What is finite only in part of the numbers, by the names that torch has: operators, types."""

from __future__ import annotations

LOGS = ("log", "log2", "log10")
"""Above 0; so are their derivatives."""
ROOTS = ("sqrt", "rsqrt")
"""From 0 on; the derivative above 0."""
ARCS = ("acos", "arccos", "asin", "arcsin", "atanh", "arctanh", "erfinv")
"""From -1 to 1; the derivative between them."""
ARCS_OF_LARGE = ("acosh", "arccosh")
"""From 1 on; the derivative above 1."""
EXPONENTIALS = ("exp", "exp2", "expm1", "sinh", "cosh")
"""Up to the logarithm of the type's largest number."""
DIVISIONS = ("div", "true_divide", "reciprocal", "rsqrt", "remainder", "fmod")
"""Not at 0, for what is below."""
POWERS = ("pow", "float_power")
"""Of a base above 0, unless the exponent is whole and positive."""
HALVES = ("float16", "bfloat16")
"""Types with less range than float32, or fewer digits."""
