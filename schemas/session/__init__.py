"""Sans-I/O delivery between the controller and one agent.

Inputs are decoded messages, clock ticks and things to send; outputs are values that state what to
send, publish or accept. Events up are numbered per (node, boot) and delivered once and in order.
Deltas down are ordered by (term, version, stage), those of sweeps separately by (term, revision);
they are delivered at least once and applied once. Nothing here uses a socket, a clock or a thread.
"""

from schemas.session.agent_session import (
    MAX_RESENT,
    MAX_SPOOLED,
    AgentOutput,
    AgentSession,
    Apply,
    Publish,
    Rejected,
    SendHello,
    ToController,
    Welcomed,
)
from schemas.session.controller_session import (
    MAX_HELD,
    Condition,
    ControllerOutput,
    ControllerSession,
    Deliver,
    ToNode,
)
from schemas.session.delivery_rules import (
    Order,
    SessionTimings,
    SweepOrder,
    equivalent_hellos,
    order_of,
    sweep_order_of,
)

__all__ = [
    "MAX_HELD",
    "MAX_RESENT",
    "MAX_SPOOLED",
    "AgentOutput",
    "AgentSession",
    "Apply",
    "Condition",
    "ControllerOutput",
    "ControllerSession",
    "Deliver",
    "Order",
    "Publish",
    "Rejected",
    "SendHello",
    "SessionTimings",
    "SweepOrder",
    "ToController",
    "ToNode",
    "Welcomed",
    "equivalent_hellos",
    "order_of",
    "sweep_order_of",
]
