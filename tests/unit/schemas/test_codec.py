from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any, Final

import msgpack  # type: ignore[import-untyped]
import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from schemas.codec import CODECS, MAX_BYTES, READ_LOG, REQUEST, Codec, encode, tag_of
from schemas.errors import MalformedMessageError, OnesError, TooLargeError
from schemas.wire import Message
from schemas.wire.agent import Heartbeat
from schemas.wire.client import CancelJob, GetSearch, PutSnapshot
from schemas.wire.feed import ReadLog
from tests.support.schemas_examples import EXAMPLES, JOB, kinds_on_the_wire
from tests.support.schemas_golden import (
    CONVERSATIONS,
    FOLDER,
    conversations,
    extend_grown,
    golden,
    golden_tags,
    write_missing,
)
from tests.support.sizes import examples
from tests.unit.schemas.plain_messages import instances, leaves, of_another_type, plain, spoiled

TAGS: Final = sorted(EXAMPLES)
KINDS: Final = kinds_on_the_wire()
DEEP: Final = 3000
every_tag = pytest.mark.parametrize("tag", TAGS)
every_codec = pytest.mark.parametrize("codec", CODECS, ids=lambda codec: codec.conversation)


def codecs_of(tag: str) -> list[Codec[Any]]:
    """The conversations in which a message may appear; one made up for a nested message."""
    return [codec for codec in CODECS if tag in codec.tags] or [Codec[Any]("nested", KINDS[tag])]


def refusal(codec: Codec[Any], data: bytes) -> MalformedMessageError:
    with pytest.raises(MalformedMessageError) as refused:
        codec.decode(data)
    return refused.value


# --- golden bytes


@every_tag
def test_a_message_is_written_as_its_golden_bytes(tag: str) -> None:
    assert encode(EXAMPLES[tag]) == golden(tag)


@every_tag
def test_plain_msgpack_reads_a_map_with_the_tag_under_type(tag: str) -> None:
    read = msgpack.unpackb(golden(tag), use_list=False)

    assert read == plain(EXAMPLES[tag])
    assert read["type"] == tag


@every_tag
def test_a_message_is_decoded_from_any_map_with_its_keys(tag: str) -> None:
    read = msgpack.unpackb(golden(tag))
    backwards = dict(reversed(read.items()))
    newer = read | {"since_1_1": {"nested": [1, {"a": None}]}}

    for codec in codecs_of(tag):
        for same in (read, backwards, newer):
            assert codec.decode(msgpack.packb(same)) == EXAMPLES[tag]
        assert codec.decode(memoryview(golden(tag))) == EXAMPLES[tag]


def test_every_tag_on_the_wire_has_an_example_and_a_golden_file() -> None:
    assert set(EXAMPLES) == set(KINDS)
    assert golden_tags() == set(KINDS)


def test_every_tagged_message_takes_part_in_a_conversation() -> None:
    tagged, waiting = set(), [Message]
    while waiting:
        children = waiting.pop().__subclasses__()
        waiting.extend(children)
        tagged |= {child for child in children if "." in tag_of(child)}

    assert {kind for kind in tagged if kind.__module__.startswith("schemas.")} == set(
        KINDS.values()
    )


@every_tag
def test_an_example_sets_every_field(tag: str) -> None:
    unset = [name for _, name, value in leaves(EXAMPLES[tag]) if value in ("", (), {})]
    nothing = [name for _, name, value in leaves(EXAMPLES[tag]) if value is None]
    at_default = [
        field.name
        for field in msgspec.structs.fields(EXAMPLES[tag])
        if getattr(EXAMPLES[tag], field.name) == field.default
    ]

    assert unset == []
    assert [name for name in nothing if "detail" not in name] == []
    assert at_default == []


def test_missing_golden_files_are_written_and_present_ones_never_again(tmp_path: Path) -> None:
    changed = tmp_path / "agent.hello_request.1.hex"
    changed.write_text("c0\n", encoding="ascii")

    written = write_missing(tmp_path)

    assert {path.name for path in written} | {changed.name} == {
        CONVERSATIONS,
        *(f"{tag}.hex" for tag in TAGS),
    }
    assert changed not in written
    assert changed.read_text(encoding="ascii") == "c0\n"
    assert write_missing(tmp_path) == []


def test_a_golden_file_is_extended_if_its_content_is_unchanged(tmp_path: Path) -> None:
    write_missing(tmp_path)
    whole = msgpack.unpackb(golden("agent.heartbeat_ack.1"))
    del whole["committed"]
    older = msgpack.packb(whole).hex()
    grown, changed = (
        tmp_path / f"agent.{name}.1.hex" for name in ("heartbeat_ack", "hello_request")
    )
    grown.write_text(older, encoding="ascii")
    changed.write_text("c0\n", encoding="ascii")

    assert extend_grown(tmp_path) == [grown]
    assert grown.read_text(encoding="ascii") == (FOLDER / grown.name).read_text(encoding="ascii")
    assert changed.read_text(encoding="ascii") == "c0\n"
    assert extend_grown(tmp_path) == []


def test_every_conversation_has_the_messages_that_it_had() -> None:
    assert conversations() == (FOLDER / CONVERSATIONS).read_text(encoding="ascii")


# --- any message


@settings(deadline=None, max_examples=examples(300))
@given(message=st.sampled_from(sorted(KINDS.values(), key=tag_of)).flatmap(instances))
def test_any_message_survives_the_way_through_plain_msgpack(message: Message) -> None:
    written = msgpack.packb(msgpack.unpackb(encode(message)))

    for codec in codecs_of(tag_of(type(message))):
        assert codec.decode(written) == message


@every_codec
def test_a_conversation_refuses_the_messages_of_others(codec: Codec[Any]) -> None:
    for tag in set(TAGS) - set(codec.tags):
        error = refusal(codec, golden(tag))
        assert error.field == "type"
        assert error.message == f"{codec.conversation}: Invalid value '{tag}' (field type)"
        assert error.hint == f"send one of {', '.join(sorted(codec.tags))}"


@every_codec
def test_a_newer_tag_is_refused(codec: Codec[Any]) -> None:
    for tag in codec.tags:
        newer = msgpack.unpackb(golden(tag)) | {"type": tag.removesuffix("1") + "2"}
        assert refusal(codec, msgpack.packb(newer)).field == "type"


# --- wrong fields


@every_tag
def test_a_field_of_the_wrong_type_is_named_by_its_path(tag: str) -> None:
    for path, name, value in leaves(EXAMPLES[tag]):
        for wrong in (of_another_type(value, name), msgpack.Timestamp(1)):
            data = msgpack.packb(spoiled(EXAMPLES[tag], path, wrong))
            for codec in codecs_of(tag):
                assert refusal(codec, data).field == name


@every_tag
def test_a_missing_field_is_named(tag: str) -> None:
    required = [f.encode_name for f in msgspec.structs.fields(EXAMPLES[tag]) if f.required]
    for name in required:
        short = msgpack.unpackb(golden(tag))
        del short[name]
        for codec in codecs_of(tag):
            assert f"`{name}`" in refusal(codec, msgpack.packb(short)).message


@every_tag
def test_a_field_with_a_default_may_be_missing(tag: str) -> None:
    optional = [f for f in msgspec.structs.fields(EXAMPLES[tag]) if not f.required]
    for field in optional:
        older = msgpack.unpackb(golden(tag))
        del older[field.encode_name]
        fresh = field.default if field.default_factory is msgspec.NODEFAULT else {}
        expected = msgspec.structs.replace(EXAMPLES[tag], **{field.name: fresh})
        for codec in codecs_of(tag):
            assert codec.decode(msgpack.packb(older)) == expected


def test_an_error_names_conversation_expectation_and_field() -> None:
    error = refusal(REQUEST, msgpack.packb({"type": "client.cancel_job.1", "job": 7}))

    assert error.message == "client request: Expected `str`, got `int` (field job)"
    assert (error.field, error.hint) == ("job", "")


def test_an_unknown_key_of_a_node_or_a_group_is_ignored() -> None:
    for tag, place in (("agent.hello.1", "spec"), ("agent.group_delta.3", "group")):
        newer = msgpack.unpackb(golden(tag))
        newer[place]["since_1_1"] = 1
        assert codecs_of(tag)[0].decode(msgpack.packb(newer)) == EXAMPLES[tag]


def test_an_unknown_key_of_a_job_is_refused() -> None:
    for path in (("spec", "colour"), ("spec", "stop", "hours")):
        wrong = spoiled(EXAMPLES["client.submit_job.1"], path, 1)
        error = refusal(REQUEST, msgpack.packb(wrong))
        assert error.field == ".".join(path[:-1])
        assert f"unknown field `{path[-1]}`" in error.message


# --- hostile bytes


@every_tag
def test_a_message_that_is_cut_or_followed_by_bytes_is_malformed(tag: str) -> None:
    whole = golden(tag)
    for codec in codecs_of(tag):
        for length in range(len(whole)):
            refusal(codec, whole[:length])
        refusal(codec, whole + b"\x00")


@settings(deadline=None, max_examples=examples(300))
@given(data=st.binary(max_size=200))
def test_random_bytes_are_malformed(data: bytes) -> None:
    for codec in CODECS:
        refusal(codec, data)


@settings(deadline=None, max_examples=examples(300))
@given(
    tag=st.sampled_from(TAGS),
    hits=st.lists(st.tuples(st.integers(0, 4000), st.integers(0, 255)), min_size=1, max_size=6),
)
def test_a_damaged_message_is_a_message_or_malformed(tag: str, hits: list[tuple[int, int]]) -> None:
    damaged = bytearray(golden(tag))
    for place, byte in hits:
        damaged[place % len(damaged)] = byte

    for codec in codecs_of(tag):
        with contextlib.suppress(MalformedMessageError):
            codec.decode(bytes(damaged))


NESTS: Final = {
    "arrays": b"\x91" * DEEP + b"\xc0",
    "maps": b"\x81\xa1k" * DEEP + b"\xc0",
    "maps that look like messages": b"\x81\xa4type" * DEEP + b"\xc0",
    "arrays without an end": b"\x91" * DEEP,
    "arrays that promise four billion elements": b"\xdd\xff\xff\xff\xff" * DEEP,
}


@pytest.mark.parametrize("nest", NESTS.values(), ids=NESTS)
def test_deep_nesting_is_malformed_anywhere(nest: bytes) -> None:
    for codec in CODECS:
        refusal(codec, nest)
    for tag in TAGS:
        for field in ("unknown", *EXAMPLES[tag].__struct_encode_fields__):
            rest = msgpack.unpackb(golden(tag))
            rest.pop(field, None)
            for codec in codecs_of(tag):
                refusal(codec, with_raw_value(msgpack.packb(rest), field, nest))
    assert REQUEST.decode(encode(CancelJob(job=JOB))) == CancelJob(job=JOB), "it still decodes"


NO_MESSAGES: Final = {
    "nothing": b"", "the byte that is never used": b"\xc1", "nil": b"\xc0", "an array": b"\x93\x01\x02\x03",
    "an empty map": b"\x80", "a map of four billion": b"\xdf\xff\xff\xff\xff",
    "a string of four gibibytes": b"\xc6\xff\xff\xff\xff", "a tag that is no UTF-8": b"\x81\xa4type\xa2\xff\xfe",
    "a key that is no string": b"\x81\x01\x02", "a timestamp for a tag": b"\x81\xa4type\xd6\xff\x00\x00\x00\x00",
}  # fmt: skip


@pytest.mark.parametrize("data", NO_MESSAGES.values(), ids=NO_MESSAGES)
def test_bytes_that_are_no_message_are_malformed(data: bytes) -> None:
    for codec in CODECS:
        refusal(codec, data)


def test_a_message_of_the_largest_size_passes_and_one_byte_more_is_too_large() -> None:
    frame = len(encode(PutSnapshot(digest="d", offset=0, data=bytes(70_000), total=1))) - 70_000
    largest = PutSnapshot(digest="d", offset=0, data=bytes(MAX_BYTES - frame), total=1)
    data = encode(largest)

    assert len(data) == MAX_BYTES
    assert REQUEST.decode(data) == largest
    with pytest.raises(TooLargeError) as refused:
        REQUEST.decode(data + b"\x00")
    assert str(refused.value) == (
        f"message of {MAX_BYTES + 1} bytes exceeds {MAX_BYTES} bytes; send large data in pieces"
    )


@every_codec
def test_garbage_beyond_the_bound_is_too_large_before_it_is_read(codec: Codec[Any]) -> None:
    with pytest.raises(TooLargeError):
        codec.decode(b"\x91" * (MAX_BYTES + 1))


@pytest.mark.parametrize("since", [float("inf"), float("-inf"), float("nan"), -1.0, 1e12])
def test_a_time_outside_the_calendar_is_malformed(since: float) -> None:
    with pytest.raises(MalformedMessageError, match="since"):
        READ_LOG.decode(encode(ReadLog(job=JOB, since=since)))


def test_errors_of_the_codec_are_errors_of_the_project_with_stable_codes() -> None:
    with pytest.raises(OnesError) as malformed:
        REQUEST.decode(encode(Heartbeat(session="1.1", events_sent=0)))
    with pytest.raises(OnesError) as too_large:
        REQUEST.decode(bytes(MAX_BYTES + 1))

    assert (malformed.value.code, too_large.value.code) == ("malformed", "too_large")


def test_a_request_without_fields_is_only_its_tag() -> None:
    assert encode(GetSearch()) == b"\x81\xa4type\xb3client.get_search.1"


def with_raw_value(message: bytes, key: str, value: bytes) -> bytes:
    """A packed map with one more key, whose value is given as bytes."""
    count = len(msgpack.unpackb(message))
    head = 1 if count < 16 else 3
    name: bytes = msgpack.packb(key)
    return b"\xde" + (count + 1).to_bytes(2, "big") + message[head:] + name + value
