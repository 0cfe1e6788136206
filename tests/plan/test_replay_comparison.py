"""What a run made of a trace's outages, beside what a plan makes of them: by hand, and where both must differ."""

from __future__ import annotations

import pytest

from outlast.core import events as ev
from outlast.plan.replay_comparison import HostOutage, ReplayComparison, compared

N, STALL_S, JOIN_S, BACK_S = 4, 2.0, 0.5, 3.0


def view(at_s: float, n: int, members: int, planned: bool) -> ev.AnyEvent:
    names = [f"r{slot}.1" for slot in range(members)]
    return ev.ViewInstalled(at_s=at_s, epoch=1, n=n, members=names, cause="", planned=planned)


class Run:
    """A fleet of `N` replicas, one a host, as its journal has it: steps of 0.1 s from 10.0 s on."""

    def __init__(self) -> None:
        config = {"checkpoint_every": 50}
        self.now, self.step, self.members, self.n = 10.0, 0, N, 1
        self.events: list[ev.AnyEvent] = [
            ev.RunStarted(at_s=0.0, run_id="", command=[], num_replicas=N, num_spares=0, signature={}, config=config),
            *(ev.AgentStarted(at_s=1.0, agent=f"a{h}", pid=1, host=f"h{h}") for h in range(N)),
            view(9.0, 1, N, False),
        ]
        self.told(0.1, steps=1)

    def told(self, seconds: float, steps: int, **more: float) -> None:
        work_s = seconds - sum(more.values())
        parts = {"productive": work_s * self.members / N, "degraded": work_s * (N - self.members) / N, **more}
        self.now += seconds
        self.events.append(
            ev.ProgressMade(
                at_s=self.now + 0.01, view=[1, self.n], stable=self.step, losses=[], step_s=0.1, first=self.step,
                committed=self.step + steps, committed_at_s=self.now, seconds=parts,
            )
        )  # fmt: skip
        self.step += steps

    def train(self, seconds: float) -> None:
        self.told(seconds, steps=round(seconds / 0.1))

    def lose(self) -> None:
        self.n, self.members = self.n + 1, self.members - 1
        self.events.append(view(self.now + STALL_S / 2, self.n, self.members, False))
        self.told(STALL_S, steps=1, recovery=STALL_S - 0.1, lost=0.1)

    def join(self, host: int) -> None:
        who = f"r{host}.{self.n}"
        self.events += [
            ev.ReplicaStarted(at_s=self.now - 1.0, replica=who, agent=f"a{host}", pid=1),
            ev.JoinerCaughtUp(at_s=self.now, replica=who, step=self.step, seconds=0.5),
        ]
        self.n, self.members = self.n + 1, self.members + 1
        self.events.append(view(self.now, self.n, self.members, True))
        self.told(JOIN_S, steps=1, recovery=JOIN_S)


def outlived(lost: int = 3) -> tuple[Run, list[HostOutage]]:
    """Hosts go one after the other, each for 5 s and what its return takes."""
    run, outages = Run(), []
    for host in range(1, lost + 1):
        run.train(10.0)
        outages.append(HostOutage(host=f"h{host}", at_s=run.now, until_s=run.now + 5.0))
        run.lose()
        run.train(5.0 + BACK_S - STALL_S)
        run.join(host)
    run.train(20.0)
    return run, outages


def told(run: Run, outages: list[HostOutage], places: int = N) -> ReplayComparison:
    found = compared(run.events, outages, replicas=N, places=places, spares=0)
    assert found is not None
    return found


def test_a_run_that_does_as_planned_is_foretold() -> None:
    run, outages = outlived()
    found = told(run, outages)
    assert found.seconds == pytest.approx(run.now - 10.1)
    assert found.costs.stall_s == pytest.approx(STALL_S)
    assert found.costs.join_s == pytest.approx(JOIN_S)
    assert found.costs.return_s == pytest.approx(BACK_S)
    assert (found.costs.stalls, found.costs.joins, found.costs.returns, found.outages) == (3, 3, 3, 3)
    whole_s = found.seconds - 3 * (STALL_S + JOIN_S)
    assert found.measured == pytest.approx((whole_s - 3 * 6.0 / N) / found.seconds)
    assert found.predicted == pytest.approx(found.measured, rel=1e-3)
    assert found.within
    assert found.predicted_shares["recovery"] == pytest.approx(3 * (STALL_S + JOIN_S) / found.seconds, rel=1e-3)


def test_the_prediction_does_not_look_at_what_the_run_came_to() -> None:
    run, outages = outlived()
    before = told(run, outages)
    for index, event in enumerate(run.events):
        if isinstance(event, ev.ProgressMade) and "recovery" not in event.seconds:
            slow = event.seconds["productive"] / 4
            parts = {**event.seconds, "productive": 3 * slow, "stalled": slow}
            run.events[index] = ev.ProgressMade(
                at_s=event.at_s, view=event.view, stable=event.stable, losses=[], step_s=0.1, first=event.first,
                committed=event.committed, committed_at_s=event.committed_at_s, seconds=parts,
            )  # fmt: skip
    after = told(run, outages)
    assert after.predicted == pytest.approx(before.predicted), "where a quarter of the work stood still"
    assert after.measured < 0.85 * before.measured
    assert not after.within
    assert after.points == pytest.approx(100 * (after.measured - after.predicted))
    assert after.apart == pytest.approx(after.measured / after.predicted - 1)


def test_who_is_struck_again_on_the_way_back_was_away_all_the_while() -> None:
    run, outages = outlived(lost=2)
    again = HostOutage(host="h1", at_s=outages[0].at_s + 5.5, until_s=outages[0].at_s + 7.0)
    found = told(run, [*outages, again])
    assert found.outages == 2
    assert found.costs.returns == 2
    assert found.costs.return_s == pytest.approx((1.0 + BACK_S) / 2), "from the second time that it was back"


def test_hosts_that_go_together_hold_training_up_once() -> None:
    run, outages = outlived(lost=1)
    together = [HostOutage(host=f"h{host}", at_s=outages[0].at_s + 0.1 * host, until_s=None) for host in (2, 3)]
    alone, found = told(run, outages), told(run, [*outages, *together])
    more_s = (found.predicted_shares["recovery"] - alone.predicted_shares["recovery"]) * found.seconds
    assert more_s < STALL_S, "a loss that comes while one is dealt with is dealt with in the view that follows"


def test_outages_beyond_the_stretch_count_as_far_as_they_lie_in_it() -> None:
    run, outages = outlived(lost=1)
    before = HostOutage(host="h2", at_s=1.0, until_s=2.0)
    to_the_end = HostOutage(host="h3", at_s=run.now - 10.0, until_s=None)
    late = HostOutage(host="h2", at_s=run.now + 1.0, until_s=run.now + 2.0)
    found = told(run, [before, *outages, to_the_end, late])
    assert found.outages == 2
    assert found.away == pytest.approx((5.0 + BACK_S + 10.0) / found.seconds / N)
    assert found.predicted < found.measured, "the run did not go on short of h3"


def test_a_run_that_was_never_whole_is_not_compared() -> None:
    run, outages = outlived()
    assert compared(run.events, outages, replicas=N + 1, places=N + 1, spares=0) is None
    assert compared(run.events[:6], outages, replicas=N, places=N, spares=0) is None
