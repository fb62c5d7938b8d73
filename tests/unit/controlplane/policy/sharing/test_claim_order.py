"""Order of claims by guarantees, usage and arrival, and what a guarantee takes from others."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from controlplane.policy.api import ClusterView, JobView, Reason
from controlplane.policy.sharing.caps import Ledger
from controlplane.policy.sharing.rigid_view import RigidView
from schemas.ids import JobId, NodeId, Seconds, SlotId, slot_id
from schemas.sharing import PriorityClass, Project, Sharing, UserLimits, UserShare
from tests.support.builders import A, B, job_view
from tests.support.views import decide, row_of, standing, view_of

NOW = Seconds(10_000.0)
G, H, K = JobId("g-7"), JobId("h-8"), JobId("k-9")
EMPTY = view_of(row_of(4))


def n(*indices: int) -> tuple[SlotId, ...]:
    return tuple(slot_id(NodeId("n1"), index) for index in indices)


def claim(job: JobId, account: str, slots: int = 1, at: float = 9_000.0, **more: Any) -> RigidView:
    return RigidView(job=job, account=account, submitted_at=Seconds(at), slots=slots, **more)


def holder(
    job: JobId, account: str, *holds: SlotId, began_at: float = 0.0, **more: Any
) -> RigidView:
    fields = {"waits": False, "preemptible": True, **more}
    return claim(job, account, len(holds), 1.0, holds=holds, began_at=Seconds(began_at), **fields)


def elastic(job: JobId, account: str, *slots: SlotId, least: int = 1) -> JobView:
    return job_view(
        job, 1.0, slots=(least, 8), running_on=dict.fromkeys(slots, 8), moved_at=NOW, most=8,
        account=account,
    )  # fmt: skip


def order(*rigid: RigidView, sharing: Sharing | None = None, **usage: float) -> list[JobId]:
    used = {name.replace("_", "/"): value for name, value in usage.items()}
    found = standing(EMPTY, rigid, sharing or Sharing(), Ledger(usage=used), NOW)
    return [job.job for job in found.order]


def test_the_project_and_the_user_that_used_less_for_their_weight_go_first() -> None:
    ann, bob, cat = claim(G, "p/ann"), claim(H, "p/bob"), claim(K, "q/cat")

    assert order(ann, bob, cat) == [G, H, K]
    assert order(ann, bob, cat, p_ann=10.0, p_bob=5.0, q_cat=20.0) == [H, G, K]
    weighed = Sharing(
        projects={"q": Project(weight=4.0), "p": Project(users={"ann": UserShare(weight=3.0)})}
    )
    assert order(ann, bob, cat, sharing=weighed, p_ann=10.0, p_bob=5.0, q_cat=20.0) == [K, G, H]


def test_a_claim_that_has_waited_for_a_day_goes_first() -> None:
    old = claim(H, "p/bob", at=NOW - 86_400.0)

    assert order(claim(G, "p/ann"), old, p_bob=99.0) == [H, G]


def test_without_fair_share_claims_are_served_by_arrival() -> None:
    off = Sharing(fair_share=False)

    assert order(claim(G, "p/ann", at=2.0), claim(H, "p/bob", at=1.0), sharing=off, p_bob=9.0) == [
        H,
        G,
    ]


def test_a_claim_within_a_guarantee_goes_first_and_only_those_that_fit_together_count() -> None:
    sharing = Sharing(projects={"q": Project(guaranteed=3)})
    rigid = [claim(G, "p/ann"), claim(H, "q/cat", 2), claim(K, "q/cat", 2)]

    found = standing(EMPTY, rigid, sharing, Ledger(usage={"q/cat": 9.0}), NOW)

    assert found.entitled == {H}
    assert [job.job for job in found.order] == [H, G, K]


def test_guarantees_above_what_there_is_are_scaled_down() -> None:
    sharing = Sharing(projects={"p": Project(guaranteed=6), "q": Project(guaranteed=2)})
    rigid = [claim(G, "p/ann", 3), claim(H, "q/cat", 2)]

    assert standing(EMPTY, rigid, sharing, Ledger(), NOW).entitled == {G}


def test_a_claim_beyond_a_limit_waits_and_says_so() -> None:
    sharing = Sharing(projects={"p": Project(limit=3, users={"ann": UserShare(limit=1)})})
    rigid = [
        holder(A, "p/bob", *n(0, 1)),
        claim(G, "p/ann", 2),
        claim(H, "p/cat", 2),
        claim(K, "p/ann", 1),
    ]

    decision = served(sharing, *rigid)

    assert decision.plan.local_batch.keys() == {K}
    numbers = {"needs": 2.0, "limit": 1.0, "has": 0.0}
    text = "user ann of project p may have 1 slot and has 0; it needs 2"
    assert decision.reasons[G] == Reason("limit", text, numbers)
    assert decision.reasons[H].text == "project p may have 3 slots and has 2; it needs 2"


def classed(sharing: Sharing, **classes: JobId) -> Ledger:
    """A ledger in which a job has each of these classes."""
    named = {job: name for name, job in classes.items()}
    return Ledger(
        classes=named, ranks={job: sharing.classes[one].rank for job, one in named.items()}
    )


def served(
    sharing: Sharing,
    *rigid: RigidView,
    jobs: tuple[JobView, ...] = (),
    ledger: Ledger | None = None,
) -> Any:
    view = view_of(row_of(4), *jobs)
    rules = standing(view, rigid, sharing, ledger or Ledger(), NOW)
    return decide(view, rigid, NOW, rules=rules)


def test_a_guarantee_takes_the_youngest_program_of_a_project_that_has_borrowed() -> None:
    sharing = Sharing(projects={"q": Project(guaranteed=2)})
    old, young = (
        holder(A, "p/ann", *n(0, 1), began_at=1.0),
        holder(B, "p/ann", *n(2, 3), began_at=9.0),
    )

    decision = served(sharing, old, young, claim(G, "q/cat", 2))

    assert decision.plan.local_batch == {B: {}}
    assert decision.plan.reasons[B].text == "stopped: gives slots to g-7, which needs 2 slots"
    assert decision.kept == set(n(2, 3))


def test_a_claim_without_a_guarantee_takes_no_program() -> None:
    decision = served(Sharing(), holder(A, "p/ann", *n(0, 1, 2, 3)), claim(G, "q/cat", 2))

    assert decision.plan.local_batch == {}
    assert decision.reasons[G].code == "waits"


def test_a_program_within_its_own_guarantee_is_never_taken() -> None:
    sharing = Sharing(projects={"p": Project(guaranteed=2), "q": Project(guaranteed=2)})
    mine, borrowed = holder(A, "p/ann", *n(0, 1), began_at=9.0), holder(B, "r/dan", *n(2, 3))

    assert served(sharing, mine, borrowed, claim(G, "q/cat", 2)).plan.local_batch == {B: {}}


def test_two_claims_at_once_take_no_more_than_was_borrowed() -> None:
    sharing = Sharing(projects={"p": Project(guaranteed=1), "q": Project(guaranteed=2)})
    own, lent = holder(A, "p/ann", *n(0), began_at=8.0), holder(B, "p/ann", *n(1), began_at=9.0)
    other = holder(K, "r/dan", *n(2, 3))

    decision = served(sharing, own, lent, other, claim(G, "q/cat"), claim(H, "q/cat"))

    assert decision.plan.local_batch == {B: {}, K: {}}


def test_a_program_that_must_not_run_twice_is_not_taken() -> None:
    sharing = Sharing(projects={"q": Project(guaranteed=2)})
    once = holder(A, "p/ann", *n(0, 1, 2, 3), preemptible=False)

    assert served(sharing, once, claim(G, "q/cat", 2)).plan.local_batch == {}


def test_elastic_jobs_are_taken_before_programs() -> None:
    sharing = Sharing(projects={"q": Project(guaranteed=2)})
    program = holder(A, "p/ann", *n(0, 1))
    job = elastic(B, "p/bob", *n(2, 3), least=2)

    decision = served(sharing, program, claim(G, "q/cat", 2, at=0.5), jobs=(job,))

    assert decision.plan.local_batch == {B: {}}
    assert decision.plan.reasons[B].text == "paused: gives slots to g-7, which needs 2 slots"


# --- limits of users


def test_claims_that_are_decided_together_stay_within_a_limit() -> None:
    sharing = Sharing(projects={"p": Project(limit=2)})
    rigid = [claim(job, "p/ann", at=place) for place, job in enumerate((G, H, K))]

    decision = served(sharing, *rigid)

    assert decision.plan.local_batch.keys() == {G, H}
    assert decision.reasons[K].text == "project p may have 2 slots and has 2; it needs 1"


def test_a_user_has_as_many_programs_as_the_limit_in_all_projects_together() -> None:
    sharing = Sharing(user_limits=UserLimits(running=2), users={"bob": UserLimits(running=None)})
    running = elastic(A, "p/ann", *n(0), least=1)
    rigid = [claim(G, "p/ann", at=1.0), claim(H, "q/ann", at=2.0), claim(K, "p/bob", at=3.0)]

    decision = served(sharing, *rigid, jobs=(running,))

    assert decision.plan.local_batch.keys() == {G, K}
    text = "user ann runs 1 job and 1 start before this one, as many as one user may"
    assert decision.reasons[H] == Reason("user_limit", text, {"limit": 2.0, "has": 2.0})


def test_a_user_has_as_many_slots_as_the_limit_also_of_jobs_that_an_operator_placed() -> None:
    sharing = Sharing(user_limits=UserLimits(slots=3))
    ledger = Ledger(holders={K: ("q/ann", 2)})

    decision = served(sharing, claim(G, "p/ann", 2), claim(H, "p/bob", 2), ledger=ledger)

    assert decision.plan.local_batch.keys() == {H}
    assert decision.reasons[G].text == "user ann may have 3 slots and has 2; it needs 2"


# --- classes

URGENT = Sharing(
    classes={
        "urgent": PriorityClass(rank=10, limit=2, preempts=True),
        "soon": PriorityClass(rank=5),
    }
)


def test_a_class_goes_before_fair_share_and_after_overdue_claims() -> None:
    old = claim(H, "p/bob", at=NOW - 86_400.0)
    ledger = replace(classed(URGENT, soon=G), usage={"p/ann": 99.0})
    rigid = [claim(K, "q/cat"), claim(G, "p/ann"), old]

    found = standing(EMPTY, rigid, URGENT, ledger, NOW)

    assert [job.job for job in found.order] == [H, G, K]


def test_a_class_that_preempts_takes_jobs_of_lower_rank_but_none_that_must_not_run_twice() -> None:
    once = holder(A, "p/ann", *n(0, 1), preemptible=False)
    again = holder(B, "p/ann", *n(2, 3))

    decision = served(URGENT, once, again, claim(G, "q/cat", 2), ledger=classed(URGENT, urgent=G))

    assert decision.plan.local_batch == {B: {}}
    assert decision.kept == set(n(2, 3))


def test_a_class_that_does_not_preempt_waits() -> None:
    full = holder(B, "p/ann", *n(0, 1, 2, 3))

    decision = served(URGENT, full, claim(G, "q/cat", 2), ledger=classed(URGENT, soon=G))

    assert decision.plan.local_batch == {}


def test_a_class_pauses_an_elastic_job_before_its_turn_is_over() -> None:
    job = replace(elastic(B, "p/bob", *n(0, 1, 2, 3), least=4), placed_at=NOW)

    mine = claim(G, "q/cat", 2)
    assert served(URGENT, mine, jobs=(job,)).plan.local_batch == {}
    decision = served(URGENT, mine, jobs=(job,), ledger=classed(URGENT, urgent=G))
    assert decision.plan.local_batch == {B: {}}


def test_a_class_takes_no_more_slots_than_its_limit() -> None:
    full, mine = holder(B, "p/ann", *n(0, 1)), holder(A, "q/cat", *n(2, 3))
    ledger = Ledger(classes={A: "urgent", G: "urgent"}, ranks={A: 10, G: 10})

    decision = served(URGENT, full, mine, claim(G, "q/cat", 1), ledger=ledger)

    assert decision.plan.local_batch == {}
    text = "class urgent may have 2 slots and has 2; it needs 1"
    numbers = {"needs": 1.0, "limit": 2.0, "has": 2.0}
    assert decision.reasons[G] == Reason("class_limit", text, numbers)


def test_a_guarantee_takes_nothing_of_a_higher_class() -> None:
    """Else the class would take it back, and so on."""
    sharing = replace(URGENT, projects={"q": Project(guaranteed=4)})
    lent, urgent = holder(A, "p/ann", *n(0, 1)), holder(B, "p/ann", *n(2, 3), began_at=9.0)

    ledger = classed(sharing, urgent=B)
    decision = served(sharing, lent, urgent, claim(G, "q/cat", 4), ledger=ledger)
    assert decision.plan.local_batch == {}
    decision = served(sharing, lent, urgent, claim(G, "q/cat", 2), ledger=ledger)
    assert decision.plan.local_batch == {A: {}}


WAITS = Reason("waits", "")


@dataclass
class World:
    """A cluster whose programs stop at once; claims are decided until nothing changes."""

    slots: list[Any]
    sharing: Sharing
    rigid: dict[JobId, RigidView] = field(default_factory=dict)
    stopped: Counter[JobId] = field(default_factory=Counter)
    classes: dict[JobId, str] = field(default_factory=dict)

    @property
    def ledger(self) -> Ledger:
        ranks = {job: self.sharing.classes[name].rank for job, name in self.classes.items()}
        return Ledger(classes=self.classes, ranks=ranks)

    def settle(self) -> None:
        """Carry out decisions until there is none."""
        for _ in range(2 * len(self.rigid) + 2):
            rigid = list(self.rigid.values())
            taken = {slot for job in rigid for slot in job.holds}
            slots = [replace(slot, usable=slot.slot not in taken) for slot in self.slots]
            view = ClusterView(version=1, slots=tuple(slots), jobs={})
            rules = standing(view, rigid, self.sharing, self.ledger, NOW)
            decision = decide(view, rigid, NOW, rules=rules)
            if not decision.plan.local_batch:
                return
            borrowed = Counter(rules.borrowed)
            takers = [
                job
                for job in rules.order
                if decision.reasons.get(job.job, WAITS).code == "promised"
            ]
            highest = max((self.rank(job.job) for job in takers), default=0)
            for name, on in decision.plan.local_batch.items():
                self.carry_out(name, tuple(on), borrowed, highest)
            self.limits_hold()
        raise AssertionError("claims take slots from each other in a circle")

    def rank(self, job: JobId) -> int:
        return self.ledger.ranks.get(job, 0)

    def limits_hold(self) -> None:
        for name, one in self.sharing.classes.items():
            held = [
                len(job.holds) for job in self.rigid.values() if self.classes.get(job.job) == name
            ]
            assert one.limit is None or sum(held) <= one.limit, name

    def carry_out(
        self, name: JobId, on: tuple[SlotId, ...], borrowed: Counter[str], highest: int
    ) -> None:
        job, project = self.rigid[name], self.rigid[name].account
        if not on:
            assert borrowed[project] > 0 or self.rank(name) < highest, "within its guarantee"
            borrowed[project] -= len(job.holds)
            self.stopped[name] += 1
        self.rigid[name] = replace(
            job, holds=on, waits=not on, preemptible=bool(on), began_at=Seconds(len(self.stopped))
        )

    def check(self) -> None:
        """No claim within a guarantee waits, because its slots are free or borrowed by others."""
        rigid = list(self.rigid.values())
        view = ClusterView(version=1, slots=tuple(self.slots), jobs={})
        rules = standing(view, rigid, self.sharing, Ledger(), NOW)
        assert not rules.entitled


@given(st.data())
def test_guarantees_are_kept_at_once_and_nobody_is_stopped_more_often_than_jobs_arrive(
    data: st.DataObject,
) -> None:
    """Design: each stop for a guarantee is paid by an earlier start beyond one, so there is no circle."""
    projects = data.draw(st.dictionaries(st.sampled_from("pqr"), st.integers(0, 4), max_size=3))
    sharing = Sharing(projects={name: Project(guaranteed=many) for name, many in projects.items()})
    world = World(row_of(*data.draw(st.lists(st.integers(1, 4), min_size=1, max_size=3))), sharing)

    arrived = 0
    before = Counter(world.stopped)
    for number in range(data.draw(st.integers(1, 12))):
        if world.rigid and data.draw(st.booleans()):
            del world.rigid[data.draw(st.sampled_from(sorted(world.rigid)))]
        else:
            name, account = JobId(f"j-{number}"), data.draw(st.sampled_from("pqr"))
            size = data.draw(st.integers(1, 4))
            world.rigid[name] = claim(name, account, size, at=float(number))
            arrived += 1
        if data.draw(st.booleans()):
            world.settle()
            world.check()
            assert max((world.stopped - before).values(), default=0) <= arrived
            arrived, before = 0, Counter(world.stopped)


def test_a_guarantee_and_a_class_do_not_take_slots_from_each_other_in_turn() -> None:
    classes = {"high": PriorityClass(rank=10, preempts=True)}
    sharing = Sharing(projects={"p": Project(guaranteed=2)}, classes=classes)
    world = World(row_of(2), sharing, {G: claim(G, "p", 2, at=1.0)})
    world.settle()

    world.rigid[H], world.classes[H] = claim(H, "q", 2, at=2.0), "high"
    world.settle()

    assert {name: job.holds for name, job in world.rigid.items()} == {G: (), H: n(0, 1)}
    assert world.stopped == {G: 1}


@given(st.data())
def test_classes_and_guarantees_together_stop_no_job_in_a_circle(data: st.DataObject) -> None:
    """Each stop is downwards in rank, or is paid by a start beyond a guarantee."""
    projects = {name: data.draw(st.integers(0, 4)) for name in "pq"}
    limits = st.none() | st.integers(0, 6)
    sharing = Sharing(
        projects={name: Project(guaranteed=many) for name, many in projects.items()},
        classes={
            "high": PriorityClass(rank=10, limit=data.draw(limits), preempts=True),
            "mid": PriorityClass(
                rank=5, limit=data.draw(limits), preempts=data.draw(st.booleans())
            ),
            "low": PriorityClass(rank=-5, preempts=data.draw(st.booleans())),
        },
    )
    world = World(row_of(*data.draw(st.lists(st.integers(1, 4), min_size=1, max_size=3))), sharing)

    for number in range(data.draw(st.integers(1, 12))):
        if world.rigid and data.draw(st.booleans()):
            gone = data.draw(st.sampled_from(sorted(world.rigid)))
            del world.rigid[gone]
            world.classes.pop(gone, None)
        else:
            name, account = JobId(f"j-{number}"), data.draw(st.sampled_from("pqr"))
            world.rigid[name] = claim(name, account, data.draw(st.integers(1, 4)), at=float(number))
            named = data.draw(st.sampled_from(["", "high", "mid", "low"]))
            world.classes |= {name: named} if named else {}
        world.settle()  # raises if it does not end


def test_programs_and_elastic_jobs_share_a_full_cluster_by_their_demand() -> None:
    jobs = tuple(job_view(JobId(f"e-{number}"), 1.0, slots=(1, 8)) for number in range(4))
    rigid = [holder(A, "p/ann", *n(0)), claim(G, "q/cat", 1), claim(H, "q/cat", 2)]

    decision = served(Sharing(), *rigid, jobs=jobs)

    # 4 slots, programs ask for 4 and trainings for 4: two slots for each kind.
    assert decision.plan.local_batch == {G: dict.fromkeys(n(1), 1)}
    text = "needs 2 slots; programs have 2, and 2 are their share while elastic jobs wait"
    assert decision.reasons[H].text == text


def test_the_first_program_starts_however_small_the_share_is() -> None:
    jobs = tuple(job_view(JobId(f"e-{number}"), 1.0, slots=(1, 8)) for number in range(40))

    assert served(Sharing(), claim(G, "q/cat", 3), jobs=jobs).plan.local_batch.keys() == {G}
