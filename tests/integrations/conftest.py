from __future__ import annotations

from collections.abc import Iterator

import pytest
from state_fleet import Template


@pytest.fixture(scope="session")
def torch_fleet() -> Iterator[Template]:
    template = Template("torch")
    yield template
    template.close()


@pytest.fixture(scope="session")
def megatron_fleet() -> Iterator[Template]:
    template = Template("megatron")
    yield template
    template.close()
