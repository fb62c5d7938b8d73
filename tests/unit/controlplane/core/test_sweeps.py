"""A job that is a sweep: its units go where its workers are, and what is finished stays finished."""

from __future__ import annotations

import msgspec
import pytest

from controlplane.core.commands import Announce, Command, SendDelta
from controlplane.core.desired_state import desired, desired_sweep
from controlplane.core.handlers import submission
from controlplane.core.inputs import SweepChangeRequested
from controlplane.core.model.job_phases import Phase
from schemas.ids import JobId, NodeId
from schemas.sweeps import Asha, Parameter, RandomSearch, choice
from schemas.wire.agent import UnitEnded
from schemas.wire.feed import FeedEvent
from tests.support.builders import STATES_KEY, cancelled, paused, resumed
from tests.support.sweep_world import Hopper, SweepCluster, sweep_job

N1, N2 = NodeId("n1"), NodeId("n2")


def running(slots: int = 2, nodes: int = 1, **changes: object) -> tuple[SweepCluster, JobId]:
    """A sweep whose workers have all begun units; one for each slot there is."""
    cluster = SweepCluster(**{f"n{at + 1}": slots for at in range(nodes)})
    name = cluster.submit(**sweep_job((1, slots * nodes), **changes))
    cluster.place({name: cluster.slots()})
    cluster.settle()
    assert cluster.job(name).phase is Phase.RUNNING
    return cluster, name


def busy(cluster: SweepCluster, name: JobId) -> list[Hopper]:
    return [one for one in cluster.hoppers(name) if one.unit is not None]


def events(commands: list[Command], kind: str) -> list[FeedEvent]:
    told = [command.event for command in commands if isinstance(command, Announce)]
    return [event for event in told if event.event == kind]


def train(cluster: SweepCluster, name: JobId) -> None:
    """To the end of the sweep."""
    for _ in range(10_000):
        if cluster.job(name).ended:
            return
        cluster.settle(training=True)
    raise AssertionError("the sweep does not end")


def change(name: JobId, what: str, trial: int | None = None, **more: object) -> object:
    fields: dict[str, object] = {"values": {}, "parent": None, "key": "", "user": "ann", **more}
    return SweepChangeRequested(job=name, change=what, trial=trial, **fields)  # type: ignore[arg-type]


def test_every_worker_of_a_group_takes_a_unit_of_another_trial() -> None:
    cluster, name = running(slots=2)

    units = [one.unit for one in busy(cluster, name)]

    assert len(units) == 2
    assert len({unit.result.trial for unit in units if unit}) == 2


def test_a_sweep_ends_with_its_best_trial_and_keeps_the_best_state() -> None:
    cluster, name = running(slots=2, keep=1)

    train(cluster, name)
    cluster.settle()

    job, sweep = cluster.job(name), cluster.sweep(name)
    scores = [max(trial.scores) for trial in sweep.engine.state.trials]
    best = scores.index(max(scores))
    assert job.phase is Phase.SUCCEEDED
    assert job.reason == f"best: trial {best} with accuracy {max(scores):.6g}"
    assert job.progress.metrics == {"accuracy": max(scores)}
    assert job.progress.samples_done == 2 * 3 * (10 + 20)
    kept = [file for node in cluster.world.nodes.values() for file in node.files]
    assert [(job, trial) for job, trial, _ in kept] == [(name, best)]
    assert cluster.controller.replayed() == cluster.controller.state
    ledger = cluster.controller.sweep_history(name)
    assert len(ledger.units) == 3 * 2 * 2
    assert ledger.trained_s == 2.0 * 12


def test_a_killed_worker_costs_its_unit_and_nothing_else() -> None:
    cluster, name = running(slots=2)
    cluster.end_unit(name)
    victim = busy(cluster, name)[0]
    lost = victim.unit

    victim.die()
    cluster.settle()

    sweep = cluster.sweep(name)
    assert sweep.units_done == 1
    assert cluster.job(name).phase is Phase.RUNNING
    cluster.place({name: cluster.slots()})
    train(cluster, name)
    again = cluster.controller.sweep_history(name).units_repeated
    assert (lost is not None, again) == (True, 0)
    assert len(cluster.controller.sweep_history(name).units) == 12


def test_a_report_of_a_unit_that_was_given_up_counts_for_nothing() -> None:
    cluster, name = running(slots=1)
    hopper = busy(cluster, name)[0]
    hopper.end()
    late = cluster.world.nodes[N1].said_after(cluster.controller.state.nodes[N1].committed)
    cluster.later(4000.0)  # its time is over before the controller hears of it
    assert cluster.sweep(name).units == {}

    for report in late:
        cluster.take(report)
    cluster.settle()

    assert cluster.sweep(name).units_done == 0
    assert cluster.hoppers(name) == [hopper], "who was done is not killed"
    assert hopper.unit is not None


def test_nobody_speaks_of_a_unit_that_is_another_s() -> None:
    cluster, name = running(slots=2)
    first, second = busy(cluster, name)
    attempt = first.unit.attempt  # type: ignore[union-attr]

    second.report(
        UnitEnded,
        attempt=attempt,
        metrics={},
        samples=10,
        seconds=1.0,
        scores={},
        digest="d",
        size=1,
    )
    cluster.settle()

    assert cluster.sweep(name).units_done == 0


def test_a_worker_that_dies_by_itself_costs_its_unit_and_not_the_job() -> None:
    cluster, name = running(slots=2)

    busy(cluster, name)[0].die(code=None, signal=11)
    cluster.settle()

    assert cluster.job(name).phase is Phase.RUNNING
    assert len(cluster.hoppers(name)) == 1
    train(cluster, name)
    assert cluster.job(name).phase is Phase.SUCCEEDED


def test_a_unit_that_takes_far_too_long_is_killed_with_its_worker() -> None:
    cluster, name = running(slots=2)
    cluster.end_unit(name)
    cluster.settle()
    before = {one.name for one in cluster.hoppers(name)}

    cluster.later(4000.0)
    cluster.settle()

    assert before.isdisjoint(one.name for one in cluster.hoppers(name))


def test_who_leaves_the_group_ends_its_unit_first() -> None:
    cluster, name = running(slots=2)
    first, _ = cluster.slots()

    cluster.place({name: [first]})
    cluster.settle()

    stays, leaves = sorted(cluster.hoppers(name), key=lambda one: one.slot)
    assert (stays.leaving, leaves.leaving) == (False, True)
    assert leaves.unit is not None
    leaves.end()
    cluster.settle(training=False)
    assert cluster.sweep(name).units_done == 1
    assert cluster.hoppers(name) == [stays]


def test_who_is_to_leave_takes_no_other_unit_though_it_has_not_heard_of_it_yet() -> None:
    cluster, name = running(slots=2)
    _, leaves = sorted(busy(cluster, name), key=lambda one: one.slot)
    cluster.place({name: cluster.slots()[:1]})
    assert cluster.job(name).phase is Phase.RESCALING

    leaves.end()
    known = cluster.controller.state.nodes[N1]
    for report in cluster.world.nodes[N1].said_after(known.committed):
        cluster.take(report)

    assert cluster.sweep(name).units_done == 1
    assert leaves.name not in cluster.sweep(name).units


def test_an_agent_that_missed_an_order_hears_it_when_it_greets() -> None:
    cluster, name = running(slots=1)
    node, hopper = cluster.world.nodes[N1], busy(cluster, name)[0]
    hopper.end()
    for report in node.said_after(cluster.controller.state.nodes[N1].committed):
        cluster.take(report)
    assert cluster.orders[N1]

    cluster.restart_agent(node)  # with its connection, what was under way is lost
    cluster.settle()

    assert hopper.unit is not None


def test_who_leaves_and_does_not_end_its_unit_in_time_is_killed_and_the_unit_done_again() -> None:
    cluster, name = running(slots=2, revoke_s=30.0)
    stays, leaves = sorted(busy(cluster, name), key=lambda one: one.slot)
    cluster.place({name: cluster.slots()[:1]})
    cluster.settle()
    assert leaves.alive

    cluster.later(29.0)
    cluster.settle()
    assert leaves.alive
    cluster.later(1.0)
    cluster.settle()

    assert not leaves.alive
    assert stays.alive
    train(cluster, name)
    history = cluster.controller.sweep_history(name)
    assert (len(history.units), history.units_repeated) == (12, 0)
    assert cluster.controller.replayed() == cluster.controller.state


def test_a_slot_that_is_wanted_at_once_is_given_at_once() -> None:
    cluster, name = running(slots=2, revoke_s=0.0)
    _, leaves = sorted(busy(cluster, name), key=lambda one: one.slot)

    cluster.place({name: cluster.slots()[:1]})
    cluster.settle()

    assert not leaves.alive


def test_a_paused_sweep_ends_its_units_and_goes_on_where_it_was() -> None:
    cluster, name = running(slots=2)

    cluster.take(paused(name))
    cluster.settle()
    assert cluster.job(name).phase is Phase.PAUSED
    for one in busy(cluster, name):
        one.end()
    cluster.settle()
    assert cluster.sweep(name).units_done == 2
    assert cluster.hoppers(name) == []

    cluster.take(resumed(name, auto=True))
    cluster.place({name: cluster.slots()})
    train(cluster, name)
    assert cluster.job(name).phase is Phase.SUCCEEDED
    assert cluster.controller.sweep_history(name).units_repeated == 0


def test_a_sweep_whose_last_unit_ends_while_it_is_paused_has_succeeded() -> None:
    cluster, name = running(slots=1, partitions=1, epochs=1, searcher=Asha(configurations=1))
    cluster.take(paused(name))
    cluster.settle()

    busy(cluster, name)[0].end()
    cluster.settle()

    assert cluster.job(name).phase is Phase.SUCCEEDED


def test_a_lost_node_takes_its_copies_and_the_other_one_has_the_rest() -> None:
    cluster, name = running(slots=1, nodes=2, partitions=2, replicas=2)
    for _ in range(4):
        cluster.end_unit(name)
    done = cluster.sweep(name).units_done

    cluster.lose(cluster.world.nodes[N2])
    cluster.settle()
    train(cluster, name)

    history = cluster.controller.sweep_history(name)
    assert done == 4
    assert cluster.job(name).phase is Phase.SUCCEEDED
    assert history.units_repeated == 0, "each state was in two places"
    assert cluster.controller.replayed() == cluster.controller.state


def test_a_node_that_comes_back_brings_its_states() -> None:
    cluster, name = running(slots=1)
    for _ in range(3):
        cluster.end_unit(name)

    cluster.lose(cluster.world.nodes[N1])
    assert [model.at for model in cluster.sweep(name).engine.state.models] == [0, 0, 0]
    cluster.bring_back(cluster.world.nodes[N1])
    cluster.settle()
    cluster.place({name: cluster.slots()})
    train(cluster, name)

    assert cluster.controller.sweep_history(name).units_repeated == 0


def test_a_node_that_comes_back_without_its_disk_has_finished_units_done_again() -> None:
    cluster, name = running(slots=1)
    for _ in range(3):
        cluster.end_unit(name)

    cluster.lose(cluster.world.nodes[N1])
    cluster.bring_back(cluster.world.nodes[N1], disk=False)
    cluster.settle()
    cluster.place({name: cluster.slots()})
    train(cluster, name)

    history = cluster.controller.sweep_history(name)
    assert cluster.job(name).phase is Phase.SUCCEEDED
    assert history.units_repeated == 3
    assert len(history.units) == 12


def test_a_new_controller_and_a_new_agent_find_units_under_way() -> None:
    cluster, name = running(slots=2)
    before = [one.unit for one in busy(cluster, name)]

    cluster.restart_controller()
    cluster.settle()
    cluster.restart_agent(cluster.world.nodes[N1])
    cluster.settle()

    assert [one.unit for one in busy(cluster, name)] == before
    train(cluster, name)
    assert cluster.job(name).phase is Phase.SUCCEEDED


def test_a_trial_that_fails_is_announced_and_the_others_go_on() -> None:
    cluster, name = running(slots=1, space={"lr": choice(0.1, "poison")}, searcher=Asha(4))

    train(cluster, name)

    trials = cluster.sweep(name).engine.state.trials
    bad = [trial.number for trial in trials if trial.values["lr"] == "poison"]
    assert cluster.job(name).phase is Phase.SUCCEEDED
    assert bad
    assert [trials[number].ended for number in bad] == ["failed"] * len(bad)
    history = cluster.controller.sweep_history(name)
    assert [history.trial(number).reason for number in bad] == ["model_fn raised"] * len(bad)


def test_a_sweep_of_which_every_trial_fails_has_failed_for_the_first_reason() -> None:
    space = {"lr": Parameter(choice=("poison",))}
    cluster, name = running(slots=1, space=space, searcher=Asha(2))

    train(cluster, name)

    job = cluster.job(name)
    assert job.phase is Phase.FAILED
    assert job.reason == ("none of 2 trials finished an epoch; trial 0: model_fn raised")


def test_a_cancelled_sweep_stops_at_once_and_keeps_its_best_state() -> None:
    cluster, name = running(slots=1)
    while not any(trial.scores for trial in cluster.sweep(name).engine.state.trials):
        cluster.end_unit(name)

    cluster.take(cancelled(name))
    cluster.settle()

    node = cluster.world.nodes[N1]
    assert cluster.job(name).phase is Phase.CANCELLED
    assert cluster.hoppers(name) == []
    assert len(node.files) == 1


def test_a_trial_that_its_user_stops_takes_no_further_unit() -> None:
    cluster, name = running(slots=1)
    number = busy(cluster, name)[0].unit.result.trial  # type: ignore[union-attr]

    told = cluster.take(change(name, "stop", number, key="k"))  # type: ignore[arg-type]
    again = cluster.take(change(name, "stop", number, key="k"))  # type: ignore[arg-type]

    (ended,) = events(told, "sweep.trial_ended")
    assert ended.detail == {"trial": number, "how": "stopped", "reason": "stopped by ann"}
    assert again == []
    cluster.end_unit(name, number)
    assert cluster.sweep(name).units_done == 0


def test_a_trial_is_added_paused_and_resumed() -> None:
    cluster, name = running(slots=1)

    cluster.take(change(name, "add", values={"lr": 0.5}, parent=None))  # type: ignore[arg-type]
    assert cluster.sweep(name).engine.state.trials[3].values == {"lr": 0.5}
    cluster.take(change(name, "pause", 3))  # type: ignore[arg-type]
    while cluster.sweep(name).engine.trainable:
        cluster.end_unit(name)
    assert not cluster.job(name).ended
    cluster.take(change(name, "resume", 3))  # type: ignore[arg-type]
    train(cluster, name)
    assert cluster.job(name).phase is Phase.SUCCEEDED


def test_a_trial_that_is_deleted_is_not_the_best_and_its_states_go() -> None:
    cluster, name = running(slots=1, partitions=1, epochs=2, keep=3)
    while not all(trial.scores for trial in cluster.sweep(name).engine.state.trials):
        cluster.end_unit(name)
    best = max(cluster.sweep(name).engine.state.trials, key=lambda one: max(one.scores)).number

    cluster.take(change(name, "delete", best))  # type: ignore[arg-type]
    train(cluster, name)
    cluster.settle()

    kept = {trial for node in cluster.world.nodes.values() for _, trial, _ in node.files}
    assert best not in kept
    assert len(kept) == 2
    assert not cluster.job(name).reason.startswith(f"best: trial {best} ")


def test_an_epoch_of_a_sweep_is_as_many_units_as_there_are_partitions() -> None:
    cluster, name = running(slots=2, partitions=2)
    for _ in range(4):
        cluster.end_unit(name)

    epochs = cluster.controller.history_of(name).epochs

    assert [(one.epoch, one.slots, one.whole) for one in epochs] == [(1, 2, False), (2, 2, True)]
    assert [one.samples_per_s for one in epochs] == [15.0, 10.0]  # 10 + 20 samples, and 2 x 10
    assert cluster.job(name).progress.epoch == 2


def test_a_node_with_other_data_is_left_out_and_says_how_many_samples_it_has() -> None:
    cluster, name = running(slots=1, nodes=2, replicas=2)
    other = cluster.world.nodes[N2]
    other.sizes = {0: 7, 1: 7}

    for _ in range(3):
        cluster.end_unit(name)
        cluster.place({name: cluster.slots()})
        cluster.settle()
    train(cluster, name)

    assert cluster.job(name).phase is Phase.SUCCEEDED
    assert {unit.node for unit in cluster.controller.sweep_history(name).units} <= {
        N1,
        N2,
    }


def test_policies_see_no_more_slots_than_there_are_trials_that_can_train() -> None:
    cluster, name = running(slots=4, searcher=Asha(configurations=2))

    view = cluster.controller.view().jobs[name]

    assert (view.least, view.most) == (1, 2)
    cluster.take(change(name, "pause", 0))  # type: ignore[arg-type]
    for _ in range(2):
        cluster.end_unit(name)
    assert cluster.controller.view().jobs[name].most == 1


@pytest.mark.parametrize("partitions", [2, 4])
def test_what_is_left_of_a_sweep_is_known_in_samples(partitions: int) -> None:
    cluster, name = running(slots=1, partitions=partitions)

    cluster.end_unit(name)
    view = cluster.controller.view().jobs[name]

    sizes = [samples for samples, _ in cluster.sweep(name).engine.state.data.sizes.values()]
    mean = sum(sizes) / len(sizes)
    left = 3 * 2 * partitions - 1
    assert view.stop_samples == view.samples_done + round(left * mean)


def test_the_last_trial_goes_on_as_a_job_from_its_state_and_its_sweep_hears_of_its_epochs() -> None:
    cluster, name = running(slots=2, nodes=2, searcher=RandomSearch(1), graduate_batch=8)

    train(cluster, name)

    (graduate,) = [one for one in cluster.controller.state.jobs if one != name]
    job, sweep = cluster.job(graduate), cluster.sweep(name)
    trial = job.spec.stated_trial
    model = sweep.engine.state.models[0]
    assert graduate == f"{cluster.job(name).spec.name}-t0-2"
    assert trial is not None
    assert (trial.sweep, trial.trial, trial.epochs, trial.epochs_done) == (name, 0, 2, 1)
    assert (trial.version, trial.digest) == (2, model.digest(2))
    assert trial.values == dict(sweep.engine.state.trials[0].values)
    assert len(trial.sources) >= 1
    assert (job.spec.batch_size, job.spec.slots, job.phase) == (8, (1, 4), Phase.QUEUED)
    assert cluster.job(name).phase is Phase.SUCCEEDED
    history = cluster.controller.sweep_history(name)
    assert history.trial(0).reason == f"continues as job {graduate} from epoch 1"
    assert cluster.controller.replayed() == cluster.controller.state


def test_nodes_may_forget_a_sweep_when_its_graduates_have_ended() -> None:
    cluster, name = running(slots=2, nodes=2, searcher=RandomSearch(1), graduate_batch=8)
    train(cluster, name)
    (graduate,) = [one for one in cluster.controller.state.jobs if one != name]
    state = cluster.controller.state
    assert not any(desired(state, cluster.job(name), node).forget for node in (N1, N2))

    commands = cluster.controller.take(cancelled(graduate))

    told = {
        one.node: one.delta.forget
        for one in commands
        if isinstance(one, SendDelta) and one.delta.job == name
    }
    assert told == {N1: True, N2: True}
    assert cluster.controller.replayed() == cluster.controller.state


def test_a_graduate_asks_for_its_state_where_that_is_when_it_begins() -> None:
    cluster, name = running(slots=2, nodes=2, searcher=RandomSearch(1), graduate_batch=8)
    train(cluster, name)
    (graduate,) = [one for one in cluster.controller.state.jobs if one != name]
    for node in cluster.controller.state.nodes.values():  # agents began anew, on other ports
        node.spec = msgspec.structs.replace(node.spec, states_port=node.spec.states_port + 1000)

    delta = desired(cluster.controller.state, cluster.job(graduate), N1)
    assert delta.group is None
    cluster.place({graduate: cluster.slots()[:1]})
    delta = desired(cluster.controller.state, cluster.job(graduate), N1)

    assert delta.spec is not None
    trial = delta.spec.stated_trial
    assert trial is not None
    assert trial.sources[0].endswith(":8706")


def test_keys_of_old_changes_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(submission, "MAX_CHANGE_KEYS", 2)
    cluster, name = running()

    for key in ("first", "second", "second", "third"):
        cluster.controller.take(change(name, "pause", 0, key=key))

    assert list(cluster.sweep(name).keys) == ["ann/second", "ann/third"]


def test_only_nodes_receive_the_key_for_states_of_a_sweep() -> None:
    cluster, name = running(slots=2, nodes=2, searcher=RandomSearch(1), graduate_batch=8)
    state = cluster.controller.state
    assert desired_sweep(state, cluster.job(name), cluster.sweep(name), N1).states_key == STATES_KEY

    train(cluster, name)
    (graduate,) = [one for one in state.jobs if one != name]
    cluster.place({graduate: cluster.slots()[:1]})
    delta = desired(state, cluster.job(graduate), N1)

    assert delta.spec is not None
    told, kept = delta.spec.stated_trial, cluster.job(graduate).spec.stated_trial
    assert (told and told.states_key, kept and kept.states_key) == (STATES_KEY, "")
