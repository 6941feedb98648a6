"""Types of settings whose values are bounded: checked when they are decoded, by the key's name."""

from typing import Annotated

from msgspec import Meta

PositiveFloat = Annotated[float, Meta(gt=0)]
NonNegativeFloat = Annotated[float, Meta(ge=0)]
PositiveInt = Annotated[int, Meta(ge=1)]
Share = Annotated[float, Meta(ge=0, le=1)]
NonNegativeInt = Annotated[int, Meta(ge=0)]
Port = Annotated[int, Meta(ge=0, le=65535)]
"""0: any free one."""
