"""The plugin for pytest: tests that name missing devices run on those of this machine, as under ``transload run``.

pytest imports it in every project, so it imports nothing else until a test uses it: the fixture ``transload_patch``,
the marker ``transload``, or the option ``--transload-device`` for all tests.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable, Iterator
from contextlib import ExitStack
from itertools import chain
from typing import Any

import pytest

_PROPERTY = "transload"
"""The property of a test in its report, also in JUnit's XML: what was changed for it."""


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the options for all tests."""
    group = parser.getgroup("transload", "the devices of this machine in place of those that tests name")
    where = "run all tests with patch(D): auto, spread, cpu and so on, in place of missing devices"
    group.addoption("--transload-device", metavar="D", default="", help=where)
    pretend = "the same, and make torch.cuda.is_available() True on the CPU"
    group.addoption("--transload-pretend-cuda", action="store_true", help=pretend)


@pytest.hookimpl(tryfirst=True)
def pytest_load_initial_conftests(early_config: pytest.Config) -> None:
    """Patch for all tests, before the first of their modules is imported."""
    device, pretend = _options(early_config.known_args_namespace)
    if device:
        from transload.patching.isolated import patched

        _check(device)
        until_the_end = ExitStack()
        until_the_end.enter_context(patched(device, pretend_cuda=pretend))
        early_config.add_cleanup(until_the_end.close)


def pytest_configure(config: pytest.Config) -> None:
    """Describe the marker."""
    marker = "transload(device='auto', pretend_cuda=False): run the test on the devices of this machine"
    config.addinivalue_line("markers", marker)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Look at each test when it runs, if any of them is to be patched."""
    marked = {_wanted(item) for item in items if item.get_closest_marker("transload")}
    for device, _ in marked:
        _check(device)
    if marked or _options(config.option)[0]:
        config.pluginmanager.register(_Running(), "transload-running")


@pytest.fixture
def transload_patch(request: pytest.FixtureRequest) -> Iterator[Any]:
    """Run this test with ``transload.patch()``; the devices of the marker ``transload``, if it has one."""
    from transload.patching import patch
    from transload.patching.isolated import patched

    device, pretend = _wanted(request.node)
    with patched(device or "auto", pretend_cuda=pretend) as noted, patch(device or "auto") as result:
        yield result
        _report(request.node, noted)


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Say for how many tests something was changed: results of a CPU must not be mistaken for those of a GPU."""
    counts: dict[str, int] = {}
    tests = 0
    for report in chain.from_iterable(terminalreporter.stats.values()):
        values = [value for name, value in getattr(report, "user_properties", ()) if name == _PROPERTY]
        if values and report.when == "teardown":  # each test has one
            tests += 1
            for value in values:
                counts[value] = counts.get(value, 0) + 1
    if tests:
        listed = ", ".join(f"{value} ({count})" for value, count in counts.items())
        terminalreporter.write_line(f"transload changed for {tests} test{'s' * (tests > 1)}: {listed}")


class _Running:
    """The hooks around each test, which are there only if one is to be patched."""

    def __init__(self) -> None:
        self._noted: dict[Any, str] | None = None

    @pytest.hookimpl(hookwrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, Any, None]:
        """Patch from the setup of a test to its teardown."""
        device, pretend = _wanted(item)
        if device:
            from transload.patching.isolated import patched

            with patched(device, pretend_cuda=pretend) as self._noted:
                yield
            self._noted = None
        else:
            yield

    @pytest.hookimpl(hookwrapper=True)
    def pytest_runtest_makereport(self, item: pytest.Item) -> Generator[None, Any, None]:
        """Write what was changed into the report."""
        if self._noted is not None:
            _report(item, self._noted)
        yield


def _options(options: Any) -> tuple[str, bool]:
    pretend = bool(options.transload_pretend_cuda)
    return options.transload_device or ("auto" if pretend else ""), pretend


def _wanted(item: Any) -> tuple[str, bool]:
    """The device for a test, and whether to pretend that there is CUDA; empty if it is not to be patched."""
    device, pretend = _options(item.config.option)
    marker = item.get_closest_marker("transload")
    if marker is None:
        return device, pretend

    def arguments(device: str = device or "auto", *, pretend_cuda: bool = pretend) -> tuple[str, bool]:
        return str(device), pretend_cuda

    try:
        return arguments(*marker.args, **marker.kwargs)
    except TypeError as error:
        raise pytest.UsageError(f"{item.nodeid}: @pytest.mark.transload takes a device and pretend_cuda") from error


def _check(device: str) -> None:
    """Refuse what is not a device, or not one of this machine."""
    from transload.errors import TransloadError
    from transload.patching import checked

    try:
        checked(device)
    except TransloadError as error:
        raise pytest.UsageError(f"transload: {error}") from error


def _report(item: pytest.Item, noted: Iterable[Any]) -> None:
    from transload.patching.changes import sentence

    others = [(name, value) for name, value in item.user_properties if name != _PROPERTY]
    item.user_properties[:] = [*others, *((_PROPERTY, sentence(change)) for change in noted)]
