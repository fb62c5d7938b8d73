"""Two clocks: an agent's time without an answer is over before its controller's time of silence is."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from hypothesis import example, given, settings
from hypothesis import strategies as st

from schemas.ids import BootId, Seconds, Term
from schemas.session import AgentSession, ControllerSession, SendHello, ToController, ToNode
from tests.support.sizes import examples
from tests.unit.schemas.session_network import NODE, hello

STEP_S = 0.25
ENDS_S = 60.0
FENCE_S = 8.0
DELAYS = st.lists(st.sampled_from((0.0, 0.25, 1.0, 3.0, 7.0, 20.0)), min_size=1, max_size=6)
NEVER = math.inf


@dataclass
class Road:
    """One way: each message takes its time, none overtakes another, and from `cut_s` on all are lost."""

    delays: Sequence[float]
    cut_s: float
    under_way: list[tuple[float, object]] = field(default_factory=list)
    sent: int = 0

    def send(self, message: object, now: float) -> None:
        at = now + self.delays[self.sent % len(self.delays)]
        self.sent += 1
        if now < self.cut_s:
            last = self.under_way[-1][0] if self.under_way else at
            self.under_way.append((max(at, last), message))

    def arrived(self, now: float) -> list[object]:
        due = [message for at, message in self.under_way if at <= now]
        del self.under_way[: len(due)]
        return due


def fenced_and_lost(up: Road, down: Road, *, agent_began_s: float) -> tuple[float, float]:
    """When the agent first was alone for so long, and when the controller had heard nothing for so long."""
    agent = AgentSession(NODE, BootId("boot-1"))
    controller = ControllerSession(NODE, Term(1))
    fenced = lost = NEVER
    for step in range(int(ENDS_S / STEP_S)):
        now = step * STEP_S
        agent_now = Seconds(now + agent_began_s)
        outputs = agent.tick(agent_now)
        for message in down.arrived(now):
            outputs += agent.receive(message, agent_now)  # type: ignore[arg-type]
        for output in outputs:
            match output:
                case ToController(message=said):
                    up.send(said, now)
                case SendHello():
                    up.send(None, now)
        for message in up.arrived(now):
            if message is None:
                greeting = hello(agent.boot, 0, agent.echo)
                known = controller.repeats_hello(greeting)
                answers = (
                    controller.resume_session(greeting, Seconds(now), 1, 2)
                    if known
                    else controller.open_session(greeting, 0, Seconds(now), 1, 2)
                )
            else:
                answers = controller.receive(message, Seconds(now))  # type: ignore[arg-type]
            for answer in answers:
                if isinstance(answer, ToNode):
                    down.send(answer.message, now)
        if agent.unconfirmed_s(agent_now) >= FENCE_S:
            fenced = min(fenced, now)
        if controller.session is not None and now - controller.last_received_at >= FENCE_S:
            lost = min(lost, now)
    return fenced, lost


@settings(max_examples=examples(200), deadline=None)
@given(
    up=DELAYS,
    down=DELAYS,
    up_cut_s=st.sampled_from((5.0, 20.0, NEVER)),
    down_cut_s=st.sampled_from((5.0, 20.0, NEVER)),
    agent_began_s=st.sampled_from((0.0, -1e6, 1e6)),
)
@example(up=[0.0], down=[0.0], up_cut_s=20.0, down_cut_s=NEVER, agent_began_s=0.0)
@example(up=[0.0], down=[3.0], up_cut_s=20.0, down_cut_s=NEVER, agent_began_s=1e6)
def test_an_agent_is_fenced_before_its_controller_gives_it_up_whatever_the_network_does(
    up: list[float], down: list[float], up_cut_s: float, down_cut_s: float, agent_began_s: float
) -> None:
    roads = Road(up, up_cut_s), Road(down, down_cut_s)

    fenced, lost = fenced_and_lost(*roads, agent_began_s=agent_began_s)

    assert fenced <= lost


def test_an_agent_that_is_answered_is_never_fenced() -> None:
    roads = Road([0.25], NEVER), Road([1.0], NEVER)

    assert fenced_and_lost(*roads, agent_began_s=0.0) == (NEVER, NEVER)
