"""Replays on a real driver: right numbers, from binaries or source, in whatever memory."""

from __future__ import annotations

import dataclasses
import sys

import numpy as np
import pytest
from opencl_helpers import (
    COUNT,
    SIZE_BYTES,
    expected,
    opened,
    replayed,
    room,
    run,
    spec,
    sum_twice,
)

from switchgear.backends.contract import ModelInfo
from switchgear.backends.opencl.artefact import Artefact, Buffer, BufferKind, Launch
from switchgear.ipc.errors import DriverError

RAMP = np.arange(COUNT, dtype=np.float32) / 8


@pytest.mark.parametrize("steps", [1, 2, 5])
def test_scratch_memory_is_shared_and_right(steps: int) -> None:
    """Two places serve all launches; each is overwritten while the other is read."""
    artefact = sum_twice(steps)
    with replayed(artefact) as replay:
        for values in (RAMP, -RAMP, RAMP * 3):
            (result,) = run(replay, artefact, [values])
            assert np.array_equal(result, expected(values, steps))


def test_memory_may_be_in_buffers_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where a device cannot have all of it in one, or not in parts."""
    monkeypatch.setattr(type(opened()), "has_regions", lambda self, size_bytes: False)
    artefact = sum_twice(3)
    with replayed(artefact) as replay:
        (result,) = run(replay, artefact, [RAMP])
        assert np.array_equal(result, expected(RAMP, 3))


def test_the_binary_is_taken_where_it_is_good() -> None:
    artefact = sum_twice()
    with replayed(artefact) as replay:
        assert not replay.from_binary
        run(replay, artefact, [RAMP])
        binary = replay.program_binary()

    assert binary
    again = dataclasses.replace(artefact, binary=binary)
    with replayed(again) as replay:
        assert replay.from_binary
        (result,) = run(replay, again, [RAMP])
        assert np.array_equal(result, expected(RAMP))


def test_a_binary_that_the_driver_refuses_falls_back_to_source() -> None:
    artefact = dataclasses.replace(sum_twice(), binary=b"of another driver")
    with replayed(artefact) as replay:
        assert not replay.from_binary
        (result,) = run(replay, artefact, [RAMP])
        assert np.array_equal(result, expected(RAMP))


def test_source_that_does_not_compile_is_the_drivers_error() -> None:
    artefact = dataclasses.replace(sum_twice(), source="__kernel void add(")
    with pytest.raises(DriverError) as caught, replayed(artefact):
        pass

    assert (caught.value.domain, caught.value.name) == ("opencl", "CL_BUILD_PROGRAM_FAILURE")
    assert caught.value.code == -11


def test_a_kernel_that_the_program_lacks_is_the_drivers_error() -> None:
    artefact = dataclasses.replace(sum_twice(), kernels=("add", "thrice"))
    with pytest.raises(DriverError) as caught, replayed(artefact):
        pass

    assert caught.value.name == "CL_INVALID_KERNEL_NAME"


def test_shared_memory_is_used_in_place_and_each_slot_has_its_own() -> None:
    """Two input slots and two output slots in all pairs: arguments follow the slots."""
    artefact = sum_twice()
    if not opened().host_memory:
        pytest.skip("the device has a memory of its own")

    with replayed(artefact) as replay:
        sources, targets, inputs = [], [], []
        for factor in (1, 2):
            inputs.append(room(SIZE_BYTES))
            np.frombuffer(inputs[-1], np.float32)[:] = RAMP * factor
            sources.append(replay.attach([inputs[-1]], artefact.inputs))

        outputs = [room(SIZE_BYTES) for _ in range(2)]
        targets = [replay.attach([memory], artefact.outputs) for memory in outputs]
        assert not any(slot.copies for slot in (*sources, *targets))
        for one, factor in enumerate((1, 2)):
            for two in range(2):
                outputs[two][:] = bytes(SIZE_BYTES)
                replay.run(sources[one], targets[two])
                result = np.frombuffer(outputs[two], np.float32)
                assert np.array_equal(result, expected(RAMP * factor))

        # What the client writes later is what the next run reads.
        np.frombuffer(inputs[0], np.float32)[:] = 7
        replay.run(sources[0], targets[0])
        result = np.frombuffer(outputs[0], np.float32)
        assert np.array_equal(result, expected(np.full(COUNT, 7, np.float32)))


def test_memory_that_is_not_aligned_is_copied() -> None:
    artefact = sum_twice()
    with replayed(artefact) as replay:
        source, target = room(SIZE_BYTES, aligned=False), room(SIZE_BYTES, aligned=False)
        np.frombuffer(source, np.float32)[:] = RAMP
        slots = (
            replay.attach([source], artefact.inputs),
            replay.attach([target], artefact.outputs),
        )
        assert all(len(slot.copies) == 1 for slot in slots)
        replay.run(*slots)
        assert np.array_equal(np.frombuffer(target, np.float32), expected(RAMP))


def test_a_slot_may_go_before_the_next_run() -> None:
    """An unbound session's memory is not used again, and not kept."""
    artefact = sum_twice()
    with replayed(artefact) as replay:
        target_memory = room(SIZE_BYTES)
        target = replay.attach([target_memory], artefact.outputs)
        for factor in (1, 2, 3):
            memory = room(SIZE_BYTES)
            np.frombuffer(memory, np.float32)[:] = RAMP * factor
            source = replay.attach([memory], artefact.inputs)
            replay.run(source, target)
            del source
            base = memory.obj
            memory.release()
            # One reference is `base`, one the argument: nothing of the replay's.
            assert sys.getrefcount(base) == 2
            result = np.frombuffer(target_memory, np.float32)
            assert np.array_equal(result, expected(RAMP * factor))


@pytest.mark.parametrize("size_bytes", [0, SIZE_BYTES - 4, SIZE_BYTES + 4])
def test_memory_of_another_size_is_refused(size_bytes: int) -> None:
    artefact = sum_twice()
    with replayed(artefact) as replay, pytest.raises(ValueError, match="bytes"):
        replay.attach([room(size_bytes)], artefact.inputs)


PASSING = """
__kernel void pick(__global int *y, __global const int *places) {
  size_t i = get_global_id(0);
  y[i] = places[i];
}
"""


def passing() -> Artefact:
    """`x` int32 -> itself and a copy: an output that is an input, and integers."""
    x = spec("x", "int32")
    info = ModelInfo((x,), (spec("same", "int32"), spec("copy", "int32")), "tensors", False, {})
    return dataclasses.replace(
        sum_twice(),
        info=info,
        source=PASSING,
        kernels=("pick",),
        buffers=(Buffer(BufferKind.INPUT, SIZE_BYTES), Buffer(BufferKind.OUTPUT, SIZE_BYTES)),
        launches=(Launch(0, (COUNT, 1, 1), (32, 1, 1), (1, 0)),),
        inputs=(0,),
        outputs=(0, 1),
        scratch_bytes=0,
        constants=memoryview(b""),
    )


def test_integers_are_copied_before_a_kernel_sees_them() -> None:
    """A client cannot change a place after a kernel has checked it."""
    artefact = passing()
    with replayed(artefact) as replay:
        source = replay.attach([room(SIZE_BYTES)], artefact.inputs)
        assert [place for place, _ in source.copies] == [0]


def test_an_output_may_be_an_input() -> None:
    artefact = passing()
    with replayed(artefact) as replay:
        values = np.arange(COUNT, dtype=np.int32)[::-1].copy()
        for result in run(replay, artefact, [values]):
            assert np.array_equal(result, values)


def test_each_launch_is_timed_by_the_device() -> None:
    artefact = sum_twice(3)
    with replayed(artefact) as replay:
        run(replay, artefact, [RAMP])
        times = replay.launch_times_ns(2)

    assert len(times) == 4
    assert all(0 < took < 10**9 for took in times)


def test_other_constants_can_be_tried() -> None:
    artefact = sum_twice()
    with replayed(artefact) as replay:
        replay.write_constant(1, np.ones(COUNT, np.float32).data.cast("B"))
        (result,) = run(replay, artefact, [RAMP])
        assert np.array_equal(result, (RAMP + 1) * 2)


def test_the_probe_has_a_known_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    device = opened()
    from switchgear.backends.opencl import probe

    assert str(device.identity()["device"]) in probe.check_known_answer(device)

    good = probe.probe_artefact()
    bad = dataclasses.replace(good, source=good.source.replace("1.0f", "1.5f"))
    monkeypatch.setattr(probe, "probe_artefact", lambda: bad)
    with pytest.raises(DriverError, match="1024 of 1024 sums are wrong"):
        probe.check_known_answer(device)
