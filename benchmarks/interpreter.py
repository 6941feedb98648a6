"""What ran a benchmark."""

import sysconfig


def built() -> str:
    """How the interpreter was compiled: with profiles of itself it is a seventh faster."""
    if "--enable-optimizations" in (sysconfig.get_config_var("CONFIG_ARGS") or ""):
        return "configured with --enable-optimizations"
    return (
        "not configured with --enable-optimizations (distributions may use profiles all the same)"
    )
