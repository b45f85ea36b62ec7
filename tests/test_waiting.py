"""The order in which a lane's waiting requests are run."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from switchgear.daemon.waiting import SLACK, TURNS_KEPT, Waiting

NEVER = 2**63


def request(pid: int = 1, priority: int = 1, deadline_ns: int = NEVER, uid: int = 0) -> Any:
    return SimpleNamespace(
        session=SimpleNamespace(peer=SimpleNamespace(pid=pid, uid=uid)),
        priority=priority,
        deadline_ns=deadline_ns,
        waiting=False,
    )


def drained(waiting: Waiting) -> list[Any]:
    found = []
    while (item := waiting.pop()) is not None:
        found.append(item)

    return found


def test_priority_goes_before_deadline_and_deadline_before_turn() -> None:
    waiting = Waiting()
    low = request(priority=2, deadline_ns=1)
    late, soon, whenever = request(deadline_ns=20), request(deadline_ns=10), request()
    for item in (low, whenever, late, soon):
        waiting.push(item)

    assert drained(waiting) == [soon, late, whenever, low]


def test_a_client_with_many_waits_behind_the_first_of_each_other() -> None:
    waiting = Waiting()
    many = [request(pid=1) for _ in range(16)]
    for item in many:
        waiting.push(item)

    one, two = request(pid=2), request(pid=3)
    waiting.push(one)
    waiting.push(two)

    order = drained(waiting)
    assert order[:3] == [many[0], one, two]
    assert order[3:] == many[1:]


def test_a_client_that_was_served_gets_no_second_turn_before_the_others() -> None:
    waiting = Waiting()
    waiting.push(request(pid=1))
    waiting.push(other := request(pid=2))
    waiting.pop()
    waiting.push(again := request(pid=1))

    assert drained(waiting) == [other, again]


def test_the_one_to_give_up_is_the_last_of_lower_priority() -> None:
    waiting = Waiting()
    normal, newer = request(priority=2), request(priority=2)
    batch = request(pid=2, priority=3, uid=1, deadline_ns=5)
    last = request(pid=2, priority=3, uid=1)
    for item in (last, normal, batch, newer):
        waiting.push(item)

    assert [waiting.least_urgent(priority) for priority in (3, 2, 1)] == [None, last, last]
    assert [waiting.least_urgent(priority, 0) for priority in (2, 1)] == [None, newer]
    waiting.withdraw(last)
    assert [waiting.least_urgent(priority) for priority in (2, 1)] == [batch, batch]
    waiting.withdraw(batch)
    assert [waiting.least_urgent(priority) for priority in (2, 1)] == [None, newer]


def test_what_is_less_urgent_than_asked_for_stays() -> None:
    waiting = Waiting()
    gone, normal, batch = request(priority=1), request(priority=2), request(priority=3)
    for item in (batch, gone, normal):
        waiting.push(item)

    waiting.withdraw(gone)
    assert waiting.pop(1) is None
    assert waiting.pop(2) is normal
    assert waiting.pop(2) is None
    assert (waiting.pop(), waiting.pop(), len(waiting)) == (batch, None, 0)


def test_users_are_counted() -> None:
    waiting = Waiting()
    first = request(uid=7)
    waiting.push(first)
    waiting.push(request(uid=7))
    waiting.push(request(uid=8))
    assert (waiting.of_user(7), waiting.of_user(8), waiting.of_user(9)) == (2, 1, 0)

    waiting.withdraw(first)
    assert waiting.of_user(7) == 1
    waiting.take_all()
    assert waiting.of_user(7) == 0
    assert len(waiting) == 0


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["push", "push", "pop", "withdraw", "give up"]),
            st.integers(1, 5),
            st.integers(1, 3),
            st.sampled_from([NEVER, 5, 9]),
        ),
        max_size=200,
    )
)
def test_each_comes_out_once_and_nothing_grows(steps: list[tuple[str, int, int, int]]) -> None:
    waiting = Waiting()
    inside: list[Any] = []

    def remove(found: Any) -> None:
        # Two of the same fields are two requests.
        inside[:] = [item for item in inside if item is not found]

    for kind, pid, priority, deadline_ns in steps:
        if kind == "push":
            item = request(pid, priority, deadline_ns, uid=pid)
            inside.append(item)
            waiting.push(item)
        elif kind == "pop":
            found = waiting.pop()
            if found is None:
                assert not inside
            else:
                best = min((i.priority, i.deadline_ns) for i in inside)
                assert (found.priority, found.deadline_ns) == best
                remove(found)
        elif kind == "give up":
            found = waiting.least_urgent(priority, uid=pid)
            lower = [i for i in inside if i.priority > priority and i.session.peer.uid == pid]
            assert (found is None) is (not lower)
            if found is not None:
                assert any(found is item for item in lower)
                assert found.priority == max(i.priority for i in lower)
                remove(found)
                waiting.withdraw(found)
        elif inside:
            waiting.withdraw(inside.pop(pid % len(inside)))

        assert len(waiting) == len(inside)
        assert len(waiting._heap) <= 2 * len(inside) + SLACK

    assert sorted(map(id, waiting.take_all())) == sorted(map(id, inside))


def test_clients_that_come_and_go_are_forgotten() -> None:
    waiting = Waiting()
    waiting.push(request(pid=0))
    for pid in range(1, 4 * TURNS_KEPT):
        waiting.push(request(pid=pid))
        waiting.pop()

    assert len(waiting._turns) <= TURNS_KEPT + 2
