"""Published state changes: a hint for those who follow; the journal is the truth."""

from __future__ import annotations

from schemas.ids import JobId, NodeId, Seconds
from schemas.messages import Message

Detail = dict[str, str | int | float | bool | None]


class FeedEvent(Message, tag="feed.event.1"):
    """Something that users can see happened, numbered without gaps for the cluster's life."""

    seq: int  # 1-based
    time: Seconds  # since the epoch
    event: str  # such as job.submitted
    job: JobId | None
    node: NodeId | None
    detail: Detail
