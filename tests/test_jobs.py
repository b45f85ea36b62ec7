"""Jobs: how each end is told, cancelling at any moment, bounds."""

from __future__ import annotations

import asyncio
import errno
import logging
from typing import TYPE_CHECKING, Any

import pytest

from switchgear.daemon.jobs import KEPT_PER_USER, Job, Jobs
from switchgear.ipc.errors import BadModel, QuotaExceeded, UnknownJob

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

OWNER, STRANGER = 1000, 1001


async def done(_: Job) -> dict[str, object]:
    return {"answer": 42}


async def forever(_: Job) -> dict[str, object]:
    await asyncio.Event().wait()
    raise AssertionError("never")


async def ended(job: Job) -> None:
    version = job.version
    while not job.ended:
        version = await job.changed(version)


def run(test: Callable[[], Coroutine[Any, Any, None]]) -> None:
    asyncio.run(test())


def test_a_result_is_told() -> None:
    async def test() -> None:
        job = Jobs(4).start("load", "face", OWNER, done)
        assert (job.identity, job.kind, job.subject, job.state) == (
            1,
            "load",
            "face",
            "running",
        )
        await ended(job)

        assert job.to_json() == {
            "state": "done",
            "phase": "waiting",
            "done": 0,
            "total": 0,
            "result": {"answer": 42},
        }

    run(test)


def test_an_error_is_told_with_its_details() -> None:
    async def test() -> None:
        async def fail(_: Job) -> dict[str, object]:
            raise BadModel("it is cut", bytes_needed=7)

        job = Jobs(4).start("load", "x", OWNER, fail)
        await ended(job)
        fields: Any = job.to_json()

        assert fields["state"] == "failed"
        assert str(fields["error"]).endswith("BadModel")
        assert fields["parameters"]["message"] == "it is cut"
        assert fields["parameters"]["details"] == {"bytes_needed": 7}

    run(test)


def test_a_fault_of_ours_is_logged_and_told_as_one(caplog: pytest.LogCaptureFixture) -> None:
    async def test() -> None:
        async def fail(_: Job) -> dict[str, object]:
            raise ZeroDivisionError("secret of the inside")

        job = Jobs(4).start("load", "x", OWNER, fail)
        await ended(job)
        fields: Any = job.to_json()

        assert str(fields["error"]).endswith("InternalError")
        assert "secret" not in str(fields)

    with caplog.at_level(logging.ERROR):
        run(test)

    assert "secret of the inside" in caplog.text


def test_a_shortage_of_the_system_is_no_fault() -> None:
    async def test() -> None:
        async def fail(_: Job) -> dict[str, object]:
            raise OSError(errno.EMFILE, "many")

        job = Jobs(4).start("load", "x", OWNER, fail)
        await ended(job)

        assert job.error is not None
        assert job.error.name == "NoSpace"

    run(test)


def test_a_cancelled_job_ends_as_cancelled() -> None:
    async def test() -> None:
        job = Jobs(4).start("load", "x", OWNER, forever)
        await asyncio.sleep(0)
        job.cancel()
        await ended(job)
        assert job.state == "cancelled"
        assert job.error is not None
        assert job.error.name == "Cancelled"
        job.cancel()
        assert job.state == "cancelled"

    run(test)


def test_a_job_that_is_cancelled_before_its_first_step_gives_back_what_it_has() -> None:
    async def test() -> None:
        steps = []

        async def work(_: Job) -> dict[str, object]:
            steps.append("begun")
            try:
                await asyncio.Event().wait()
            finally:
                steps.append("given back")

            return {}

        job = Jobs(4).start("load", "x", OWNER, work)
        job.cancel()
        await ended(job)

        assert job.state == "cancelled"
        assert steps == ["begun", "given back"]

    run(test)


def test_a_stop_ends_all_of_them_begun_or_not() -> None:
    async def test() -> None:
        jobs = Jobs(8)
        begun = [jobs.start("load", "x", OWNER, forever) for _ in range(3)]
        await asyncio.sleep(0)
        begun += [jobs.start("load", "x", OWNER, forever) for _ in range(3)]
        await jobs.stop()

        assert {job.state for job in begun} == {"cancelled"}
        assert jobs.running(OWNER) == []
        await jobs.stop()

    run(test)


def test_watchers_see_progress_and_the_end() -> None:
    async def test() -> None:
        go_on = asyncio.Event()

        async def work(job: Job) -> dict[str, object]:
            job.progress("copy", 1, 10)
            await go_on.wait()
            job.progress("copy", 10, 10)
            return {}

        job = Jobs(4).start("load", "x", OWNER, work)
        seen = []

        async def watch() -> None:
            version = 0
            while not job.ended:
                version = await job.changed(version)
                seen.append((job.state, job.phase, job.done, job.total))
                go_on.set()

        await asyncio.gather(watch(), watch())

        assert ("running", "copy", 1, 10) in seen
        assert seen[-1] == ("done", "copy", 10, 10)
        # One that comes late does not wait.
        await asyncio.wait_for(job.changed(job.version), 5)

    run(test)


def test_a_user_has_so_many_at_once() -> None:
    async def test() -> None:
        jobs = Jobs(2)
        mine = [jobs.start("load", "x", OWNER, forever) for _ in range(2)]
        with pytest.raises(QuotaExceeded, match="more than 2 jobs"):
            jobs.start("load", "x", OWNER, forever)

        jobs.start("load", "x", STRANGER, done)
        mine[0].cancel()
        await ended(mine[0])
        jobs.start("load", "x", OWNER, done)
        await jobs.stop()

    run(test)


def test_jobs_of_others_are_not_known() -> None:
    async def test() -> None:
        jobs = Jobs(4)
        job = jobs.start("load", "x", OWNER, done)

        assert jobs.get(job.identity, OWNER) is job
        assert jobs.get(job.identity, 0) is job
        for identity, uid in ((job.identity, STRANGER), (99, OWNER), (0, 0), (-1, 0)):
            with pytest.raises(UnknownJob):
                jobs.get(identity, uid)

        assert jobs.running(OWNER) == jobs.running(0) == [job]
        assert jobs.running(STRANGER) == []
        await ended(job)
        assert jobs.running(0) == []

    run(test)


def test_ended_jobs_are_forgotten_in_the_end_and_running_ones_are_not() -> None:
    async def test() -> None:
        jobs = Jobs(4)
        running = jobs.start("load", "x", STRANGER, forever)
        first = jobs.start("load", "x", OWNER, done)
        await ended(first)
        for _ in range(KEPT_PER_USER):
            last = jobs.start("load", "x", OWNER, done)
            await ended(last)

        jobs.start("load", "x", OWNER, done)
        with pytest.raises(UnknownJob):
            jobs.get(first.identity, OWNER)

        assert jobs.get(last.identity, OWNER).state == "done"
        assert jobs.get(running.identity, STRANGER) is running
        await jobs.stop()

    run(test)


def test_many_jobs_of_one_user_drop_none_of_another_and_a_long_one_is_kept() -> None:
    async def test() -> None:
        jobs = Jobs(4)
        go_on = asyncio.Event()

        async def long(job: Job) -> dict[str, object]:
            await go_on.wait()
            return {}

        mine = jobs.start("load", "x", STRANGER, done)
        await ended(mine)
        first = jobs.start("load", "x", OWNER, long)
        for _ in range(2 * KEPT_PER_USER):
            await ended(jobs.start("load", "x", OWNER, done))

        go_on.set()
        await ended(first)
        await ended(jobs.start("load", "x", OWNER, done))
        assert jobs.get(mine.identity, STRANGER) is mine
        assert jobs.get(first.identity, OWNER) is first

    run(test)
