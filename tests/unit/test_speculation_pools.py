"""The pools: every request is in exactly one place in any life, and flow control keeps the pool small but not empty."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.speculation.pools import LittleFlow, Place, Pools, PublishedFlow


def test_one_life():
    pools = Pools[str](capacity=2)
    pools.add([1, 2, 3])
    assert [pools.place(i) for i in (1, 2, 3)] == [Place.RUNNING, Place.RUNNING, Place.PENDING]
    assert pools.claim(5) == [1, 2]
    pools.deliver(2, "two")
    pools.deliver(1, "one")
    assert pools.level == 2
    assert pools.withdraw(1) == [(2, "two")]
    pools.resume(2)
    assert pools.ready == 1
    pools.remove(1)
    assert pools.place(1) is None
    assert pools.place(3) is Place.RUNNING
    assert pools.claim(5) == [2, 3]


@pytest.mark.parametrize("steps", [0, 1, 2, 3])
def test_an_aborted_request_never_returns(steps):
    """Aborted while running, drafting, drafted or verifying: late deliveries and resumes are dropped."""
    pools = Pools[str](capacity=1)
    pools.add([1])
    for step in [lambda: pools.claim(1), lambda: pools.deliver(1, "d"), lambda: pools.withdraw(1)][:steps]:
        step()
    pools.remove(1)
    pools.remove(1)
    pools.deliver(1, "late")
    pools.resume(1)
    assert len(pools) == pools.level == pools.ready == 0
    assert not pools._drafts


@settings(max_examples=80, deadline=None)
@given(st.data())
def test_every_request_is_in_exactly_one_place(data):
    pools, hands, fresh = Pools[int](capacity=4), {"drafting": [], "verifying": []}, iter(range(1000))
    for _ in range(data.draw(st.integers(1, 40))):
        move = data.draw(st.sampled_from(["add", "claim", "deliver", "withdraw", "resume", "remove"]))
        if move == "add":
            pools.add([next(fresh)])
        elif move == "claim":
            hands["drafting"] += pools.claim(data.draw(st.integers(0, 3)))
        elif move == "withdraw":
            hands["verifying"] += [request for request, _ in pools.withdraw(data.draw(st.integers(0, 3)))]
        elif move == "deliver" and hands["drafting"]:
            pools.deliver(hands["drafting"].pop(), 0)
        elif move == "resume" and hands["verifying"]:
            pools.resume(hands["verifying"].pop())
        elif move == "remove" and len(pools):
            pools.remove(data.draw(st.sampled_from(sorted(pools._places))))
        queues = [*pools._pending, *pools._running, *pools._drafted]
        assert len(queues) == len(set(queues))
        places = [pools.place(request) for request in pools._places]
        assert len(queues) + places.count(Place.DRAFTING) + places.count(Place.VERIFYING) == len(pools)
        assert set(pools._drafts) == set(pools._drafted)
        assert len(pools) - len(pools._pending) <= 4


def test_flow_control():
    assert PublishedFlow().target(16) == 16
    flow = LittleFlow(slack=0.25)
    assert flow.target(16) == 16
    flow.observe(draft_s=0.01, verify_s=0.04)
    assert flow.target(16) == 16
    for _ in range(100):
        flow.observe(draft_s=0.08, verify_s=0.04)
    assert flow.target(16) == pytest.approx(40, abs=1)
