"""Settings as `kvlb up` reads them."""

from collections.abc import Callable
from pathlib import Path

import pytest

from kvlb.settings import KvlbSettings, Overrides, load_settings


@pytest.fixture
def load() -> Callable[..., KvlbSettings]:
    """Settings of a file with this text, with options over it, in this environment."""

    def read(
        text: str, tmp_path: Path, overrides: Overrides | None = None, **environ: str
    ) -> KvlbSettings:
        path = tmp_path / "kvlb.yaml"
        path.write_text(text)
        return load_settings(path, overrides or Overrides(), environ)

    return read
