from __future__ import annotations

from collections.abc import Iterator

import pytest
from session_kit import Server


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    made = Server(tmp_path_factory.mktemp("fork"))
    yield made
    made.close()
