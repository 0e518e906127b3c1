"""Planning of jobs: every requested byte is read once for each request, in jobs that fit a slot."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from transload.io.sources import Source
from transload.opening.jobs import CELL, Job, ReadRequest, jobs

CELLS = st.sampled_from([1, 2, 7, 16, 64])
GAPS = st.sampled_from([0, 1, 5, 1000])
REQUESTS = st.lists(
    st.builds(
        ReadRequest,
        st.integers(0, 2),
        st.integers(0, 300),
        st.integers(0, 120),
        st.sampled_from(["cpu", "cuda:0", "cuda:1"]),
    ),
    max_size=12,
)


@given(REQUESTS, CELLS, GAPS)
def test_every_requested_byte_is_read_once_from_its_offset(requests: list[ReadRequest], cell: int, gap: int) -> None:
    received: Counter[tuple[int, int]] = Counter()
    for job in jobs(requests, cell, gap):
        for run in job.runs:
            request = requests[run.request]
            assert (request.file, request.device) == (job.file, job.device)
            assert run.offset == request.offset + run.begin
            received.update((run.request, run.begin + position) for position in range(run.nbytes))
    assert received == Counter(
        (index, position) for index, request in enumerate(requests) for position in range(request.nbytes)
    )


@given(REQUESTS, CELLS, GAPS)
def test_job_lies_in_one_cell(requests: list[ReadRequest], cell: int, gap: int) -> None:
    for job in jobs(requests, cell, gap):
        assert job.begin == min(run.offset for run in job.runs)
        assert job.end == max(run.offset + run.nbytes for run in job.runs)
        assert job.begin // cell == (job.end - 1) // cell
        assert job.wanted == sum(run.nbytes for run in job.runs) > 0
        assert all(run.nbytes > 0 for run in job.runs)


@given(REQUESTS, CELLS, GAPS)
def test_unrequested_bytes_are_read_only_in_gaps_within_the_limit(
    requests: list[ReadRequest], cell: int, gap: int
) -> None:
    for job in jobs(requests, cell, gap):
        reach = job.begin
        for run in job.runs:
            assert run.offset <= reach + gap
            reach = max(reach, run.offset + run.nbytes)


@given(REQUESTS, CELLS)
def test_requests_first_appear_in_file_order(requests: list[ReadRequest], cell: int) -> None:
    order = dict.fromkeys(run.request for job in jobs(requests, cell) for run in job.runs)
    places = [requests[index][:2] for index in order]
    assert places == sorted(places)


def test_empty_requests_need_no_jobs() -> None:
    assert list(jobs([])) == []
    assert list(jobs([ReadRequest(0, 5, 0), ReadRequest(0, 5, 0, "cuda:0")])) == []


def test_large_request_is_split_at_cell_boundaries() -> None:
    planned = list(jobs([ReadRequest(0, 100, 3 * CELL)]))
    assert [(job.begin, job.end) for job in planned] == [
        (100, CELL),
        (CELL, 2 * CELL),
        (2 * CELL, 3 * CELL),
        (3 * CELL, 3 * CELL + 100),
    ]


def test_many_small_requests_share_jobs() -> None:
    """20,000 tensors of 64 floats, with the alignment of torch."""
    planned = list(jobs([ReadRequest(0, 320 * index, 256) for index in range(20_000)]))
    assert len(planned) == -(-20_000 * 320 // CELL)
    assert sum(job.wanted for job in planned) == 20_000 * 256


def test_requests_farther_apart_than_the_gap_are_separate_jobs() -> None:
    near, far = ReadRequest(0, 0, 10), ReadRequest(0, 10 + Source.gap + 1, 10)
    assert len(list(jobs([near, far]))) == 2
    assert len(list(jobs([near, far._replace(offset=10 + Source.gap)]))) == 1


def test_neighbouring_requests_for_other_devices_are_separate_jobs() -> None:
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


def test_overlapping_requests_are_all_read() -> None:
    requests = [ReadRequest(0, 0, 40), ReadRequest(0, 0, 40), ReadRequest(0, 10, 5), ReadRequest(0, 39, 1)]
    planned = list(jobs(requests, cell=16))
    assert sum(job.wanted for job in planned) == 86
    assert all(job.end - job.begin <= 16 for job in planned)


@pytest.mark.parametrize("offset", [2**31 - 5, 2**32, 2**63 - 3, 2**64 + 1, 10**30])
def test_offsets_of_any_size_are_planned(offset: int) -> None:
    planned = list(jobs([ReadRequest(0, offset, CELL + 9)]))
    assert sum(job.wanted for job in planned) == CELL + 9
    assert planned[0].begin == offset
    assert planned[-1].end == offset + CELL + 9


def test_jobs_are_generated_lazily() -> None:
    """Planning a huge request must not delay its first job."""
    first = next(jobs([ReadRequest(0, 0, 1 << 62)]))
    assert isinstance(first, Job)
