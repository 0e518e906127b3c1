"""The plan: every wanted byte is read once for everyone who wants it, in jobs that fit a slot."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from transload.loading.jobs import CELL, GAP, Job, ReadRequest, jobs

CELLS = st.sampled_from([1, 2, 7, 16, 64])
GAPS = st.sampled_from([0, 1, 5, 1000])
WANTS = st.lists(
    st.builds(
        ReadRequest,
        st.integers(0, 2),
        st.integers(0, 300),
        st.integers(0, 120),
        st.sampled_from(["cpu", "cuda:0", "cuda:1"]),
    ),
    max_size=12,
)


@given(WANTS, CELLS, GAPS)
def test_every_wanted_byte_comes_once_from_its_place(requests: list[ReadRequest], cell: int, gap: int) -> None:
    received: Counter[tuple[int, int]] = Counter()
    for job in jobs(requests, cell, gap):
        for run in job.runs:
            request = requests[run.request]
            assert (request.file, request.device) == (job.file, job.device)
            assert run.offset == request.offset + run.begin
            received.update((run.request, run.begin + at) for at in range(run.nbytes))
    assert received == Counter((index, at) for index, request in enumerate(requests) for at in range(request.nbytes))


@given(WANTS, CELLS, GAPS)
def test_a_job_lies_in_one_cell(requests: list[ReadRequest], cell: int, gap: int) -> None:
    for job in jobs(requests, cell, gap):
        assert job.begin == min(run.offset for run in job.runs)
        assert job.end == max(run.offset + run.nbytes for run in job.runs)
        assert job.begin // cell == (job.end - 1) // cell
        assert job.wanted == sum(run.nbytes for run in job.runs) > 0
        assert all(run.nbytes > 0 for run in job.runs)


@given(WANTS, CELLS, GAPS)
def test_what_nobody_wants_is_read_only_between_neighbours(requests: list[ReadRequest], cell: int, gap: int) -> None:
    for job in jobs(requests, cell, gap):
        reach = job.begin
        for run in job.runs:
            assert run.offset <= reach + gap
            reach = max(reach, run.offset + run.nbytes)


@given(WANTS, CELLS)
def test_memory_is_asked_for_in_the_order_of_the_files(requests: list[ReadRequest], cell: int) -> None:
    first = dict.fromkeys(run.request for job in jobs(requests, cell) for run in job.runs)
    places = [requests[index][:2] for index in first]
    assert places == sorted(places)


def test_nothing_is_wanted() -> None:
    assert list(jobs([])) == []
    assert list(jobs([ReadRequest(0, 5, 0), ReadRequest(0, 5, 0, "cuda:0")])) == []


def test_a_large_one_is_cut_where_cells_end() -> None:
    made = list(jobs([ReadRequest(0, 100, 3 * CELL)]))
    assert [(job.begin, job.end) for job in made] == [
        (100, CELL),
        (CELL, 2 * CELL),
        (2 * CELL, 3 * CELL),
        (3 * CELL, 3 * CELL + 100),
    ]


def test_many_small_ones_are_read_together() -> None:
    """20,000 tensors of 64 floats, as torch aligns them."""
    made = list(jobs([ReadRequest(0, 320 * index, 256) for index in range(20_000)]))
    assert len(made) == -(-20_000 * 320 // CELL)
    assert sum(job.wanted for job in made) == 20_000 * 256


def test_far_ones_are_read_apart() -> None:
    near, far = ReadRequest(0, 0, 10), ReadRequest(0, 10 + GAP + 1, 10)
    assert len(list(jobs([near, far]))) == 2
    assert len(list(jobs([near, far._replace(offset=10 + GAP)]))) == 1


def test_neighbours_on_other_devices_are_other_jobs() -> None:
    requests = [
        ReadRequest(0, 0, 4),
        ReadRequest(0, 4, 4, "cuda:0"),
        ReadRequest(0, 8, 4, "cuda:1"),
        ReadRequest(1, 12, 4, "cuda:1"),
    ]
    assert [(job.file, job.device) for job in jobs(requests)] == [
        (0, "cpu"),
        (0, "cuda:0"),
        (0, "cuda:1"),
        (1, "cuda:1"),
    ]


def test_those_that_overlap_are_all_served() -> None:
    requests = [ReadRequest(0, 0, 40), ReadRequest(0, 0, 40), ReadRequest(0, 10, 5), ReadRequest(0, 39, 1)]
    made = list(jobs(requests, cell=16))
    assert sum(job.wanted for job in made) == 86
    assert all(job.end - job.begin <= 16 for job in made)


@pytest.mark.parametrize("offset", [2**31 - 5, 2**32, 2**63 - 3, 2**64 + 1, 10**30])
def test_positions_of_any_size(offset: int) -> None:
    made = list(jobs([ReadRequest(0, offset, CELL + 9)]))
    assert sum(job.wanted for job in made) == CELL + 9
    assert made[0].begin == offset
    assert made[-1].end == offset + CELL + 9


def test_jobs_are_made_one_by_one() -> None:
    """A terabyte is not planned before its first byte is read."""
    first = next(jobs([ReadRequest(0, 0, 1 << 62)]))
    assert isinstance(first, Job)
