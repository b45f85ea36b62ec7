"""Instances: which are shared, which count, and that each comes back once."""

from __future__ import annotations

import pytest

from switchgear.daemon.instances import Instance, Instances
from switchgear.daemon.model import Model
from switchgear.daemon.model_store import Stored
from switchgear.ipc.errors import Overloaded
from switchgear.ipc.slot import TensorSpec

X = (TensorSpec("x", "float32", (1, 4), (-1, 4), 16),)
PER_MODEL, TOTAL_BYTES = 3, 1000


@pytest.fixture
def instances() -> Instances:
    return Instances(PER_MODEL, TOTAL_BYTES)


def model(digest: str = "a", *, state: bool = False) -> Model:
    stored = Stored(digest * 64, 100, -1, None, 0, 0)
    return Model(stored, X, X, "signature", state, {}, 10, 5)


def acquire(
    instances: Instances, model: Model, rows: int | None = None, size: int = 10
) -> Instance:
    shapes: dict[str, tuple[int, ...]] = {"x": (rows, 4)} if rows else {}
    return instances.acquire(model, shapes, X, X, size)


def test_stateless_sessions_share_an_instance(instances: Instances) -> None:
    shared = model()
    first = acquire(instances, shared)

    assert acquire(instances, shared) is first
    assert (first.holders, first.stateful) == (2, False)
    assert not instances.release(first)
    assert instances.release(first)
    assert acquire(instances, shared) is not first


def test_the_own_shape_is_not_counted(instances: Instances) -> None:
    held = [acquire(instances, model(), size=10 * TOTAL_BYTES) for _ in range(2 * PER_MODEL)]

    assert len({instance.identity for instance in held}) == 1


def test_each_choice_of_shapes_is_one_instance(instances: Instances) -> None:
    shared = model()
    two, three = acquire(instances, shared, 2), acquire(instances, shared, 3)

    assert two.shapes == {"x": (2, 4)}
    assert two.identity != three.identity
    assert acquire(instances, shared, 2) is two
    acquire(instances, shared, 4)
    with pytest.raises(Overloaded, match="has 3 instances"):
        acquire(instances, shared, 5)

    # One that is there is no further one.
    assert acquire(instances, shared, 3) is three
    for _ in range(2):
        instances.release(three)

    acquire(instances, shared, 5)


def test_a_stateful_model_has_one_for_each_session(instances: Instances) -> None:
    pinned = model(state=True)
    held = [acquire(instances, pinned) for _ in range(PER_MODEL)]

    assert len({instance.identity for instance in held}) == PER_MODEL
    assert all(instance.stateful and instance.holders == 1 for instance in held)
    with pytest.raises(Overloaded) as caught:
        acquire(instances, pinned)

    assert caught.value.details["retry_after_ms"] == 1000
    assert instances.release(held[0])
    acquire(instances, pinned)
    # Other models have their own count.
    acquire(instances, model("b", state=True))


def test_memory_of_all_is_bounded(instances: Instances) -> None:
    one, two = model("a", state=True), model("b", state=True)
    first = acquire(instances, one, size=600)
    with pytest.raises(Overloaded) as caught:
        acquire(instances, two, size=401)

    assert caught.value.details == {
        "bytes_needed": 401,
        "bytes_free": 400,
        "retry_after_ms": 1000,
    }
    second = acquire(instances, two, size=400)
    instances.release(first)
    instances.release(second)
    for name in "cdefghijkl":
        acquire(instances, model(name, state=True), size=100)

    with pytest.raises(Overloaded):
        acquire(instances, model("m", state=True), size=1)


def test_a_refusal_takes_nothing(instances: Instances) -> None:
    pinned = model(state=True)
    for _ in range(5):
        with pytest.raises(Overloaded):
            acquire(instances, pinned, size=TOTAL_BYTES + 1)

    assert [acquire(instances, pinned, size=300) for _ in range(PER_MODEL)]
