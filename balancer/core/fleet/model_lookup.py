"""Which model of the fleet a request means.

Rules:

1. A name is a base model, one of its aliases, or an adapter, as some instance lists it.
2. No name (absent, null or empty) means the fleet's only base model, as engines do it.
3. A name that no instance ever listed is the client's fault (404) once any instance has been
   asked for its models; before that nobody can tell, so it is 503.
4. One that only prefill instances list is 503, and is told as that: nobody answers for it.

Cost: a dictionary lookup, but for the first request of a model after each change of the fleet.
"""

from typing import Any

import msgspec

from balancer.core.errors import (
    BadRequestError,
    BalancerError,
    ModelNotFoundError,
    NoInstanceError,
)
from balancer.core.fleet.snapshot import Fleet, Instance


class MeantModel(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """A model by the client's name and by ours."""

    model: str
    base_model: str
    lora: str | None


def find_model(fleet: Fleet, name: Any) -> MeantModel:
    """Look `name` up. Raises BadRequestError, ModelNotFoundError or NoInstanceError."""
    known: MeantModel | None = fleet.found.get(("meant", name)) if isinstance(name, str) else None
    if known is not None:
        return known
    if name is None or name == "":
        name = _only_model(fleet)
    if not isinstance(name, str):
        raise BadRequestError("`model` must be a string", param="model")
    serving = fleet.serving(name)
    served = next((each.models for each in sorted(serving, key=_is_down) if each.models), None)
    if served is None:
        raise unknown_model(fleet, name)
    lora = None if name in served.aliases else name
    # By the name found: only names of the fleet are kept.
    meant = MeantModel(model=name, base_model=served.base, lora=lora)
    fleet.found["meant", name] = meant
    return meant


def unknown_model(fleet: Fleet, name: str) -> BalancerError:
    """The error for a model that no instance lists, in the words of engines."""
    if not any(each.models for each in fleet.instances):
        return NoInstanceError("no instance has told its models yet")
    return ModelNotFoundError(f"The model `{name}` does not exist.", param="model")


def nobody_answers(fleet: Fleet, model: str) -> BalancerError:
    """The error for a model that is known, and that nobody who answers clients can be asked for."""
    answering = [each for each in fleet.instances if each.role.answers_clients]
    if any(each.models is None or each.models.serves(model) for each in answering):
        return NoInstanceError("no instance that serves this model is available")
    return NoInstanceError(
        f"no decode or mixed instance has `{model}`, only prefill instances: load it on one that "
        "answers, too"
    )


def _is_down(instance: Instance) -> bool:
    return not instance.is_available


def _only_model(fleet: Fleet) -> str:
    bases = {each.models.base for each in fleet.instances if each.models}
    if not bases:
        raise NoInstanceError("no instance has told its models yet")
    if len(bases) > 1:
        raise BadRequestError("`model` is required: this fleet serves several", param="model")
    return bases.pop()
