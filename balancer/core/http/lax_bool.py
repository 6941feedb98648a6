"""Reads a flag of a JSON body as engines do: pydantic isn't strict there.

Rules:

1. True are `true`, the numbers 1 and 1.0, and `TRUE_WORDS` in any case; false are `false`, 0, 0.0 and
   `FALSE_WORDS`. No blanks around them, nothing else.
2. null is what an absent field is: not asked for. What can't be read is the engine's to refuse.

Cost: one comparison for a real boolean, or an absent one.
"""

from typing import Any, Final

TRUE_WORDS: Final = frozenset({"1", "on", "t", "true", "y", "yes"})
FALSE_WORDS: Final = frozenset({"0", "f", "false", "n", "no", "off"})


def is_true(value: Any) -> bool:
    """Tell whether engines take `value` for true."""
    if value is True or value is None or value is False:
        return value is True
    if isinstance(value, str):
        return value.lower() in TRUE_WORDS
    return isinstance(value, int | float) and value == 1


def is_flag(value: Any) -> bool:
    """Tell whether engines can read `value` as a flag; null is none."""
    if isinstance(value, str):
        return value.lower() in TRUE_WORDS or value.lower() in FALSE_WORDS
    return isinstance(value, int | float) and value in {0, 1}
