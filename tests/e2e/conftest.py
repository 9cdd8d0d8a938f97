"""Fork servers and reference runs that all end-to-end tests share, and the choice between covering and full matrix."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path

import pytest
from e2e_harness import Cell, ForkServer, Job, Outcome, Program, Runner, assert_clean, assert_identical, running

from hotswap.launch.job import PRELOADED

PRELOAD = {
    # Its own server: what lets Megatron-Core run without CUDA changes torch for the whole process.
    "megatron": ("torch", *PRELOADED, "hotswap.demo.train_megatron"),
    "torch": ("torch", *PRELOADED, "hotswap.demo.train_fsdp2", "hotswap.demo.train_ddp"),
}


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--full-matrix", action="store_true", help="every victim at every moment (name tests/e2e)")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "full_matrix: beyond the covering subset of the fault matrix")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """The covering subset is the default; what is left out then is deselected, and pytest says how much."""
    if config.getoption("--full-matrix", default=False) or "full_matrix" in config.option.markexpr:
        return
    beyond = [item for item in items if item.get_closest_marker("full_matrix")]
    if beyond:
        config.hook.pytest_deselected(items=beyond)
        items[:] = [item for item in items if not item.get_closest_marker("full_matrix")]


@pytest.fixture(scope="session")
def server_of(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[Program], ForkServer]]:
    """The fork server for a program, started when first asked for."""
    servers: dict[str, ForkServer] = {}

    def get(program: Program) -> ForkServer:
        name = program.preload
        if name not in servers:
            servers[name] = ForkServer(tmp_path_factory.mktemp(f"fork-{name}"), PRELOAD[name])
        return servers[name]

    yield get
    for server in servers.values():
        server.close()


@pytest.fixture(scope="session")
def reference_of(
    tmp_path_factory: pytest.TempPathFactory, server_of: Callable[[Program], ForkServer]
) -> Callable[[Cell], Outcome]:
    """The undisturbed run to compare a cell with; one for each program and length."""
    found: dict[tuple[str, int], Outcome] = {}

    def get(cell: Cell) -> Outcome:
        key = cell.program.name, cell.train.steps
        if key not in found:
            directory = tmp_path_factory.mktemp(f"reference-{cell.program.name}")
            undisturbed = Cell(program=cell.program, steps=cell.steps, spares=0)
            with running(undisturbed, directory, server_of(cell.program)) as job:
                found[key] = job.finish()
            assert_clean(found[key])
            assert_identical(found[key], found[key])
            assert len(found[key].history.losses) == cell.train.steps
        return found[key]

    return get


@pytest.fixture
def start(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, server_of: Callable[[Program], ForkServer]
) -> Callable[[Cell], AbstractContextManager[Job]]:
    """Start a cell's job, to be disturbed by the test while it runs."""
    name = re.sub(r"\W+", "-", request.node.name)[:60]

    def begin(cell: Cell) -> AbstractContextManager[Job]:
        return running(cell, Path(tmp_path_factory.mktemp(name)), server_of(cell.program))

    return begin


@pytest.fixture
def run(start: Callable[[Cell], AbstractContextManager[Job]]) -> Runner:
    """Run a cell's job to its end; nothing may be left of it."""

    def whole(cell: Cell) -> Outcome:
        with start(cell) as job:
            outcome = job.finish()
        assert_clean(outcome)
        return outcome

    return whole
