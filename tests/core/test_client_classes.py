"""Classes of clients: found by their keys, which nobody keeps."""

import hashlib
from hashlib import sha256

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from balancer.core.routing.client_classes import Client, ClientClasses
from balancer.core.settings.admission import AdmissionSettings, ClientClass


def digest(key: str) -> str:
    return sha256(key.encode()).hexdigest()


CLASSES = ClientClasses(
    (
        ClientClass(keys_sha256=(digest("sk-fast"), digest("sk-two")), priority=-1, weight=4),
        ClientClass(keys_sha256=(digest("sk-batch"),), priority=5),
    )
)


@pytest.mark.parametrize(
    ("sent", "priority", "weight"),
    [
        pytest.param("Bearer sk-fast", -1, 4, id="bearer"),
        pytest.param("bearer  sk-two ", -1, 4, id="bearer-spelled-otherwise"),
        pytest.param("sk-batch", 5, 1, id="x-api-key"),
        pytest.param("Bearer sk-unknown", 0, 1, id="unknown"),
        pytest.param("", 0, 1, id="no-key"),
    ],
)
def test_a_key_has_the_priority_and_weight_of_its_class(
    sent: str, priority: int, weight: float
) -> None:
    """Whichever header it comes in; who is in no class is as anybody."""
    name = digest(sent) if sent else ""

    assert CLASSES.client(sent) == Client(key=name, priority=priority, weight=weight)


@given(st.text(min_size=1))
def test_without_classes_all_are_alike(key: str) -> None:
    """Law: only the key tells clients apart, and it isn't kept, however long."""
    told = hashlib.sha256(key.encode("utf-8", "surrogatepass")).hexdigest()

    assert ClientClasses(()).client(key) == Client(key=told)
    assert ClientClasses(()).client("") == Client()


@pytest.mark.parametrize("key", ["sk-secret", "A" * 64, "a" * 63])
def test_settings_take_digests_only(key: str) -> None:
    """A key itself would stand in the file, and in whatever shows it."""
    with pytest.raises(msgspec.ValidationError):
        msgspec.convert({"classes": {"fast": {"keys_sha256": [key]}}}, AdmissionSettings)
