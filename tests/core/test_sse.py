"""Bytes to frames: whatever the line ends, whatever the cuts, the same frames with the same bytes.

A wire case is written as steps: the bytes up to and including the one that completes a frame, and that
frame. ``run_every_way`` then feeds them whole, byte by byte ("not yet" before each step's last byte), cut in
two at every place, and with an unfinished frame behind them.
"""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from proxy.core.sse import Frame, Framer

BOM = b"\xef\xbb\xbf"

Seen = tuple[bytes, bytes | None, bytes]
Step = tuple[bytes, Seen | None]


def seen(frames: list[Frame]) -> list[Seen]:
    return [(frame.raw, frame.event, frame.data) for frame in frames]


def read(*chunks: bytes, max_frame: int = 8 * 1024 * 1024) -> list[Frame]:
    """All frames of a body that comes in these chunks."""
    framer = Framer(max_frame)
    frames = [frame for chunk in chunks for frame in framer.feed(chunk)]
    return frames + framer.end()


def said(frames: list[Frame]) -> list[tuple[bytes | None, bytes]]:
    return [(frame.event, frame.data) for frame in frames]


def one(stream: bytes) -> Frame:
    """The only frame of a body."""
    (frame,) = read(stream)
    return frame


def plain(data: bytes, event: bytes | None = None) -> Step:
    """An LF-only frame as most servers write it, complete with its last byte."""
    raw = (b"event: " + event + b"\n" if event is not None else b"") + b"data: " + data + b"\n\n"
    return raw, (raw, event, data)


def run_every_way(*steps: Step) -> None:
    stream = b"".join(step for step, _ in steps)
    expected = [frame for _, frame in steps if frame is not None]

    assert expected == seen(read(stream))
    byte_by_byte(steps)
    for cut in range(len(stream) + 1):
        assert expected == seen(read(stream[:cut], stream[cut:])), cut
    assert expected == seen(read(stream + b"data: unfinished\ndata: fra"))
    trailing = plain(b"more")[1]
    assert [*expected, trailing] == seen(read(stream + b"data: more\n\n"))


def byte_by_byte(steps: tuple[Step, ...]) -> None:
    framer = Framer()
    for step, frame in steps:
        for i in range(len(step) - 1):
            assert framer.feed(step[i : i + 1]) == [], step[: i + 1]
        assert seen(framer.feed(step[-1:])) == ([frame] if frame is not None else [])
    assert framer.end() == []


# --- the wire cases: upstream's bytes as they stand in cases.json --------------------------------------

CONTINUE = (
    b'{"type":"response.output_item.done","item":{"type":"task_continue_request","id":"continue_a1",'
    b'"step":3},"id":"resp_u1"}'
)
COMPLETED = (
    b'{"type":"response.completed","sequence_number":9,"response":{"id":"resp_u2","object":"response",'
    b'"created_at":1,"model":"sup","status":"completed","output":[{"id":"m2","type":"message",'
    b'"role":"assistant","status":"completed","content":[{"type":"output_text","text":"seven",'
    b'"annotations":[]}]}]}}'
)
DELTA = (
    b'{"type":"response.output_text.delta","item_id":"m1","output_index":0,"content_index":0,'
    b'"delta":"%b","sequence_number":2}'
)


def test_a_crlf_cut_between_two_reads_is_one_line_end() -> None:
    """SSE-01: JSON over two data lines with CRLF, cut between CR and LF twice, is one frame."""
    raw = (
        b'event: response.output_item.done\r\ndata: {"type":"response.output_item.done",\r\n'
        b'data: "item":{"type":"task_continue_request","id":"continue_a1","step":3},"id":"resp_u1"}\r\n\r\n'
    )
    data = CONTINUE.replace(b'done","item"', b'done",\n"item"')
    run_every_way((raw, (raw, b"response.output_item.done", data)), plain(COMPLETED))
    first, second = raw.index(b'\r\ndata: "item'), len(raw) - 1
    framer = Framer()
    assert framer.feed(raw[: first + 1]) == []
    assert framer.feed(raw[first + 1 : second]) == []
    assert seen(framer.feed(raw[second:])) == [(raw, b"response.output_item.done", data)]


def test_a_bom_at_the_start_is_no_part_of_the_first_field() -> None:
    """SSE-04: the BOM is taken off, also byte by byte; the frame's raw bytes hold none."""
    raw, frame = plain(CONTINUE)
    run_every_way((BOM + raw, frame))
    assert seen(read(b"\xef", b"\xbb\xbf", raw)) == [frame]
    completed, frame = plain(COMPLETED)
    run_every_way((BOM + completed, frame))


def test_a_bom_inside_a_value_stays() -> None:
    """SSE-04: U+FEFF in a JSON string is text."""
    run_every_way(plain(BOM + b"first"), plain(DELTA % (b"a" + BOM + b"b")))


@pytest.mark.parametrize("line", [BOM + b"data: x", BOM + b": c", BOM + b"id: 1", BOM])
def test_a_bom_later_on_makes_an_unknown_field_that_is_left_out(line: bytes) -> None:
    """SSE-04: a line that begins with a BOM isn't sent on; at the stream's front it would be another."""
    raw, frame = plain(b"a")
    run_every_way(plain(b"first"), (line + b"\n" + raw, frame))
    run_every_way((BOM + line + b"\n" + raw, frame))


def test_only_cr_lf_and_crlf_end_a_line() -> None:
    """SSE-06: U+2028, U+2029, U+0085 and the control characters that str.splitlines knows are text."""
    text = "one\u2028two\u2029three\u0085four\v\f\x1c\x1d\x1e".encode()
    run_every_way(
        plain(DELTA % text),
        plain(CONTINUE.replace(b'"step":3', '"step":3,"note":"keep\u2028me"'.encode())),
        plain(COMPLETED.replace(b"seven", "a\u2029b".encode())),
    )


@pytest.mark.parametrize("end", [b"\n", b"\r\n"])
@pytest.mark.parametrize("size", [1000, 65536, 3_000_000])
def test_a_line_of_two_megabytes_is_a_line(end: bytes, size: int) -> None:
    """SSE-07: no line has a ceiling of its own, and the frame behind the long one comes too."""
    item = b'{"type":"function_call_output","id":"f1","call_id":"c1","output":"' + b"A" * 2_000_000 + b'"}'
    data = b'{"type":"response.output_item.done","output_index":0,"item":' + item + b"}"
    raw = b"data: " + data + end + end
    stream = raw + b"data: " + CONTINUE + b"\n\n"
    chunks = [stream[i : i + size] for i in range(0, len(stream), size)]
    assert seen(read(*chunks)) == [(raw, None, data), plain(CONTINUE)[1]]


def test_small_chunks_of_a_large_frame_take_no_quadratic_time() -> None:
    """SSE-07: nearly 8 MiB in 64-byte chunks and 100 KB in single bytes; rescanning would never end."""
    raw = b"data: " + b"A" * 8_000_000 + b"\n\n"
    assert len(read(*(raw[i : i + 64] for i in range(0, len(raw), 64)))) == 1
    raw = b"data: " + b"A" * 100_000 + b"\r\n\r\n"
    assert len(read(*(raw[i : i + 1] for i in range(len(raw))))) == 1


def test_the_space_behind_the_colon_may_be_missing() -> None:
    """SSE-08: ``data:`` and ``event:`` without a space are as good."""
    raw = b"event:response.output_item.done\ndata:" + CONTINUE + b"\n\n"
    completed = b"data:" + COMPLETED + b"\n\n"
    run_every_way(
        (raw, (raw, b"response.output_item.done", CONTINUE)), (completed, (completed, None, COMPLETED))
    )


@pytest.mark.parametrize(
    ("line", "data"),
    [
        (b"data:  x", b" x"),
        (b"data: ", b""),
        (b"data:", b""),
        (b"data", b""),
        (b"data:\tx", b"\tx"),
        (b"data: a: b", b"a: b"),
        (b"data::", b":"),
    ],
)
@pytest.mark.parametrize("end", [b"\n", b"\r\n"])
def test_one_leading_space_is_removed_and_no_colon_means_empty(line: bytes, data: bytes, end: bytes) -> None:
    """SSE-08: only one space goes; a data line without a colon is data, and empty."""
    raw = line + end + end
    run_every_way((raw, (raw, None, data)))
    several = b"data: a" + end + line + end + end
    run_every_way((several, (several, None, b"a\n" + data)))


def test_comments_are_neither_frames_nor_part_of_one() -> None:
    """SSE-10: keep-alives vanish between frames and inside one, which they don't break."""
    name = b"response.output_item.done"
    raw = b"event: " + name + b"\n: inside an event\ndata: " + CONTINUE + b"\n\n"
    run_every_way(
        (b": PROCESSING\n\n", None),
        (b":\n\n", None),
        (raw, plain(CONTINUE, name)[1]),
        (b": ping - 2\n\n", None),
        plain(COMPLETED),
    )


@pytest.mark.parametrize("half", [b"", b"\n", b"\r", b"\r\n", b"\nid: 7\n", b"\n: ping\n"])
def test_an_unfinished_frame_at_the_end_does_not_exist(half: bytes) -> None:
    """SSE-13: a body that ends before the blank line ends before the frame."""
    raw, frame = plain(DELTA % b"sev")
    for last in (COMPLETED, CONTINUE):
        stream = raw + b"data: " + last + half
        for cut in range(len(stream)):
            assert seen(read(stream[:cut], stream[cut:])) == [frame]
        framer = Framer()
        framer.feed(stream)
        assert not framer.clean
        assert framer.end() == []
        assert not framer.clean


def test_upstreams_ids_are_taken_out() -> None:
    """SSE-14: id lines never go out, be they good, empty or with a NUL; every frame still comes."""
    steps = [plain(DELTA % b"%d" % i) for i in range(4)]
    ids = [b"id: 77\n", b"id: bad\0id\n", b"id:\n", b"id\n"]
    run_every_way(*((line + raw, frame) for line, (raw, frame) in zip(ids, steps, strict=True)))


def test_two_objects_on_two_data_lines_are_one_frame() -> None:
    """SSE-17: no blank line between them, so one frame, whose data isn't JSON; later frames flow."""
    raw = b"data: " + DELTA % b"a" + b"\ndata: " + CONTINUE + b"\n\n"
    run_every_way((raw, (raw, None, DELTA % b"a" + b"\n" + CONTINUE)), plain(b"{}"), plain(COMPLETED))


# --- fields ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "block", [b"event: ping", b"id: 1", b"retry: 3000", b": c", b"foo: bar", b"foo", b"event: e\nid: 1", b""]
)
@pytest.mark.parametrize("end", [b"\n", b"\r", b"\r\n"])
def test_a_block_without_data_vanishes(block: bytes, end: bytes) -> None:
    """Comments and blocks of other fields only are no frames."""
    raw = b"data: x" + end + end
    stream = block.replace(b"\n", end) + end + end + raw
    for cut in range(len(stream) + 1):
        assert seen(read(stream[:cut], stream[cut:])) == [(raw, None, b"x")]


@pytest.mark.parametrize("line", [b"id: 1", b"id:1", b"id", b"retry: 5", b"retry", b": c", b":"])
def test_lines_that_never_go_out_are_taken_out_wherever_they_stand(line: bytes) -> None:
    """``id``, ``retry`` and comments leave the raw bytes, in front, between and behind."""
    bare = b"event: e\ndata: a\ndata: b\n\n"
    lines = [b"event: e\n", b"data: a\n", b"data: b\n"]
    for at in range(len(lines) + 1):
        stream = b"".join([*lines[:at], line + b"\n", *lines[at:], b"\n"])
        run_every_way((stream, (bare, b"e", b"a\nb")))


@pytest.mark.parametrize(
    "line", [b"foo: bar", b"Data: x", b"data : x", b"ids: 1", b" : c", b"\0", b" data: x"]
)
def test_unknown_fields_stay_in_the_raw_bytes(line: bytes) -> None:
    """What legato doesn't know, somebody else may; names are exact."""
    raw = line + b"\ndata: a\n" + line + b"\n\n"
    run_every_way((raw, (raw, None, b"a")))


@pytest.mark.parametrize(
    ("raw", "event"),
    [
        (b"event: a\nevent: b\ndata: x\n\n", b"b"),
        (b"data: x\nevent: late\n\n", b"late"),
        (b"event:  two\ndata: x\n\n", b" two"),
        (b"event:\ndata: x\n\n", b""),
        (b"event\ndata: x\n\n", b""),
        (b"eventual: a\ndata: x\n\n", None),
        (b"event: a\rdata: x\r\r", b"a"),
    ],
)
def test_the_last_event_line_names_the_frame(raw: bytes, event: bytes | None) -> None:
    """An event line counts before and behind the data, without a value it is empty, not absent."""
    run_every_way(plain(b"first"), (raw, (raw, event, b"x")))


def test_an_unfinished_event_line_reads_nothing_from_the_frame_before() -> None:
    """The quick look at a chunk's last, unfinished frame stays within that frame."""
    run_every_way(plain(b"a"), plain(b"b", b"name"), plain(b"c", b""))
    framer = Framer()
    assert seen(framer.feed(b"data: a\n\nevent: na")) == [plain(b"a")[1]]
    assert seen(framer.feed(b"me\ndata: b\n\n")) == [plain(b"b", b"name")[1]]


# --- line ends ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("stream", "raw"),
    [
        (b"data: a\n\n", b"data: a\n\n"),
        (b"data: a\r\r", b"data: a\r\r"),
        (b"data: a\r\n\r\n", b"data: a\r\n\r\n"),
        (b"data: a\r\n\n", b"data: a\r\n\n"),
        (b"data: a\n\r", b"data: a\n\r"),
        (b"data: a\r\n\rd", b"data: a\r\n\r"),
        (b"data: a\r\n\r\r", b"data: a\r\n\r"),
        (b"data: a\r: c\n\r", b"data: a\r\r"),
        (b"data: a\r\n: c\r\r", b"data: a\r\n\r"),
        (b"data: a\n: c\r\n\r\n", b"data: a\n\r\n"),
    ],
)
def test_a_frame_ends_as_soon_as_its_blank_line_is_certain(stream: bytes, raw: bytes) -> None:
    """A CR ends the frame at once, but behind a CRLF it waits for one byte more: an LF joins it."""
    byte_by_byte(((stream, (raw, None, b"a")),))
    framer = Framer()
    assert seen(framer.feed(stream)) == [(raw, None, b"a")]


@pytest.mark.parametrize("stream", [b"data: a\r\r", b"data: a\n\r"])
def test_an_lf_behind_a_frame_that_ended_at_its_cr_is_swallowed(stream: bytes) -> None:
    """The LF that comes late belongs to no frame, wherever the cut is."""
    following = plain(b"b")
    run_every_way((stream, (stream, None, b"a")), (b"\n" + following[0], following[1]))
    run_every_way((stream, (stream, None, b"a")), (b"\n\n\r\r\n" + following[0], following[1]))


def test_a_waiting_cr_at_the_end_of_the_body_completes_its_frame() -> None:
    """No byte comes to join it, so the blank line was a CR; told once."""
    framer = Framer()
    assert framer.feed(b"data: a\r\n\r") == []
    assert framer.feed(b"") == []
    assert not framer.clean
    assert seen(framer.end()) == [(b"data: a\r\n\r", None, b"a")]
    assert framer.clean
    assert framer.end() == []


def test_a_waiting_block_without_data_is_no_frame_at_the_end_either() -> None:
    """The end of the body makes nothing out of a comment."""
    framer = Framer()
    assert framer.feed(b": c\r\n\r") == []
    assert framer.end() == []
    assert framer.clean


@pytest.mark.parametrize(
    ("stream", "raw"),
    [
        (b"data: a\rid: 1\n\n", b"data: a\r\n\n"),
        (b"data: a\r: c\r\n\n", b"data: a\r\n\n"),
        (b"data: a\rid: 1\n\r", b"data: a\r\r"),
        (b"data: a\rid: 1\r\n\r\n", b"data: a\r\r\n"),
    ],
)
def test_taking_out_a_line_never_loses_the_blank_line(stream: bytes, raw: bytes) -> None:
    """A CR and an LF that come to stand side by side would be one line end; one LF stays for that."""
    frame = one(stream)
    assert (frame.raw, frame.data) == (raw, b"a")
    assert said(read(frame.raw + b"data: b\n\n")) == [(None, b"a"), (None, b"b")]


# --- clean and too_large --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("stream", "clean"),
    [
        (b"", True),
        (BOM, True),
        (BOM[:2], False),
        (b"data: a\n\n", True),
        (b"data: a\r\r", True),
        (b"data: a\r\r\n\n\n", True),
        (b"data: a\n\n: ping\n", True),
        (b"data: a\n\n: ping\r:\r\n:\n", True),
        (b"data: a\n\n: pi", False),
        (b"data: a\n\nd", False),
        (b"data: a\n", False),
        (b": ping\ndata: a\n", False),
        (b"event: e\n", False),
    ],
)
def test_clean_tells_whether_the_body_stands_between_two_frames(stream: bytes, clean: bool) -> None:
    """A frame that has begun isn't clean; comment lines without a blank line behind them are."""
    framer = Framer()
    framer.feed(stream)
    assert framer.clean is clean


FORTY = b"data: " + b"A" * 32 + b"\n\n"


@pytest.mark.parametrize("size", [1, 7, 1000])
def test_a_frame_may_be_as_large_as_the_bound(size: int) -> None:
    """``max_frame`` counts the block with its blank line, and no blank lines in front of it."""
    stream = b"\n\r" + FORTY + b"\n\n\n" + FORTY
    chunks = [stream[i : i + size] for i in range(0, len(stream), size)]
    assert seen(read(*chunks, max_frame=40)) == [(FORTY, None, b"A" * 32)] * 2
    assert read(*chunks, max_frame=39) == []


@pytest.mark.parametrize("end", [b"\n\n", b"\r\n\r\n", b""])
@pytest.mark.parametrize("size", [1, 7, 1000])
def test_a_frame_past_the_bound_is_the_end_of_all_frames(end: bytes, size: int) -> None:
    """SSE-07: frames before it still come, itself and those behind it don't, finished or not."""
    stream = FORTY + b"data: " + b"B" * 40 + end + FORTY
    framer = Framer(max_frame=40)
    frames = [f for i in range(0, len(stream), size) for f in framer.feed(stream[i : i + size])]
    assert seen(frames) == [(FORTY, None, b"A" * 32)]
    assert framer.too_large
    assert not framer.clean
    assert framer.feed(FORTY) == []
    assert framer.end() == []


def test_a_framer_is_not_too_large_before_it_is() -> None:
    """``too_large`` turns with the byte that passes the bound."""
    framer = Framer(max_frame=10)
    assert framer.feed(b"data: ABCD") == []
    assert not framer.too_large
    assert framer.feed(b"E") == []
    assert framer.too_large


def test_a_waiting_frame_past_the_bound_does_not_come_at_the_end() -> None:
    """A broken framer holds nothing back that the end of the body could complete."""
    framer = Framer(max_frame=10)
    assert framer.feed(b"data: ABCD\r\n\r") == []
    assert framer.too_large
    assert framer.end() == []


# --- with_data and with_event ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("raw", "data", "changed"),
    [
        (b"data: a\n\n", b"bc", b"data: bc\n\n"),
        (b"data:a\n\n", b"b", b"data:b\n\n"),
        (b"data: a\n\n", b"", b"data: \n\n"),
        (b"data\n\n", b"", b"data\n\n"),
        (b"data\n\n", b"b", b"data:b\n\n"),
        (b"event:e\ndata: a\nfoo: bar\n\n", b"b", b"event:e\ndata: b\nfoo: bar\n\n"),
        (b"data: a\r\nevent: e\r\n\r\n", b"b", b"data: b\r\nevent: e\r\n\r\n"),
        (b"foo: data: a\ndata: a\r\n\n", b"b", b"foo: data: a\ndata: b\r\n\n"),
        (b"data: a\rdata:b\ndata\r\n\r\n", b"x\ny\nz", b"data: x\rdata:y\ndata:z\r\n\r\n"),
        (b"data: a\nfoo: bar\ndata: b\n\n", b"x", b"data: x\nfoo: bar\n\n"),
        (b"data:a\r\nfoo: bar\n\n", b"x\ny", b"data:x\r\ndata:y\r\nfoo: bar\n\n"),
        (b"data: a\n\n", b"\n", b"data: \ndata: \n\n"),
        (b"data:a\n\n", b" b", b"data:  b\n\n"),
        (b"data: a\n\n", b"x\r\ny\rz", b"data: x\ndata: y\ndata: z\n\n"),
        (b"data: a\rdata: b\n\n", b"x", b"data: x\r\n\n"),
    ],
)
def test_with_data_changes_the_data_and_no_other_byte(raw: bytes, data: bytes, changed: bytes) -> None:
    """Lines go to their own places while their number is the same, else to the first one's."""
    frame = one(raw)
    assert frame.with_data(data) == changed
    normal = data.replace(b"\r\n", b"\n").replace(b"\r", b"\n")
    assert said(read(changed)) == [(frame.event, normal)]


@pytest.mark.parametrize(
    ("raw", "name", "changed"),
    [
        (b"event: e\ndata: a\n\n", None, b"data: a\n\n"),
        (b"event: e\r\ndata: a\r\nevent\r\n\r\n", None, b"data: a\r\n\r\n"),
        (b"data: a\revent: e\n\n", None, b"data: a\r\n\n"),
        (b"data: a\n\n", None, b"data: a\n\n"),
        (b"data: a\n\n", b"e", b"event: e\ndata: a\n\n"),
        (b"data: a\r\n\r\n", b"e", b"event: e\r\ndata: a\r\n\r\n"),
        (b"data: a\r\r", b"e", b"event: e\rdata: a\r\r"),
        (b"data: a\n\n", b" e", b"event:  e\ndata: a\n\n"),
        (b"data: a\n\n", b"", b"event: \ndata: a\n\n"),
        (b"data: a\n\n", b"e\ndata: no", b"event: e data: no\ndata: a\n\n"),
        (b"data: a\nevent: mine\n\n", b"e", b"data: a\nevent: mine\n\n"),
    ],
)
def test_with_event_takes_out_or_puts_in_the_event_line(
    raw: bytes, name: bytes | None, changed: bytes
) -> None:
    """None takes all event lines out; a name goes in front, where there is none, and stays on its line."""
    assert one(raw).with_event(name) == changed
    assert one(raw).with_event(name, b"bc") == one(changed).with_data(b"bc")


def test_a_frame_shows_its_bytes() -> None:
    """A failing test or a log line names the frame by what it is on the wire."""
    assert repr(one(b"data: a\n\n")) == r"Frame(b'data: a\n\n')"


# --- properties -----------------------------------------------------------------------------------------

line_ends = st.sampled_from([b"\n", b"\r", b"\r\n"])
scraps = st.sampled_from(
    [
        *(b"data", b"data:", b"data: ", b"data: {}", b"data:  a", b"event", b"event:e", b"event: f"),
        *(b"id", b"id:", b"id: 1\0", b"retry: 5", b":", b": c", b"foo: bar", b"datax: y"),
        *(BOM, BOM[:1], BOM[1:], b" ", b"\0", b"x", "\u2028\u0085".encode()),
    ]
)
lines = st.builds(bytes.__add__, scraps, line_ends)
blanks = st.builds(bytes.__mul__, line_ends, st.integers(1, 2))
usual = st.sampled_from(
    [b"data: {}\n\n", b"event: e\ndata: {}\n\n", b"data:a\r\n\r\n", b"id: 1\ndata: b\n\n"]
)
bodies = st.builds(
    bytes.__add__,
    st.sampled_from([b"", b"", BOM, BOM[:2]]),
    st.lists(lines | blanks | usual | scraps, max_size=12).map(b"".join),
)


@st.composite
def cut_bodies(draw: st.DrawFn) -> list[bytes]:
    """A body in chunks; some of them may be empty."""
    body = draw(bodies)
    cuts = draw(st.lists(st.integers(0, len(body)), max_size=8))
    return [body[a:b] for a, b in pairwise([0, *sorted(cuts), len(body)])]


moderate = settings(max_examples=200, deadline=None)


def reference(body: bytes) -> list[tuple[bytes | None, bytes]]:
    """The algorithm of the standard, word for word and slowly."""
    body = body.removeprefix(BOM)
    lines, line, i = [], b"", 0
    while i < len(body):
        if body[i] in b"\r\n":
            lines.append(line)
            line = b""
            i += 2 if body[i : i + 2] == b"\r\n" else 1
        else:
            line += body[i : i + 1]
            i += 1
    events: list[tuple[bytes | None, bytes]] = []
    event, data = None, b""
    for line in lines:
        if line == b"":
            if data != b"":
                events.append((event, data[:-1]))
            event, data = None, b""
            continue
        field, _, value = line.partition(b":")
        if value[:1] == b" ":
            value = value[1:]
        if field == b"event":
            event = value
        elif field == b"data":
            data += value + b"\n"
    return events


@moderate
@given(cut_bodies())
def test_any_cut_gives_the_same_frames(chunks: list[bytes]) -> None:
    """The property: raw bytes, event and data don't depend on where the chunks were cut."""
    body = b"".join(chunks)
    whole = seen(read(body))
    assert seen(read(*chunks)) == whole
    assert seen(read(*(body[i : i + 1] for i in range(len(body))))) == whole


@moderate
@given(cut_bodies(), st.integers(1, 30))
def test_any_cut_breaks_at_the_same_frame(chunks: list[bytes], bound: int) -> None:
    """With a bound, the frames before the break and the break itself don't depend on the cuts either."""
    whole, cut = Framer(bound), Framer(bound)
    frames = seen(whole.feed(b"".join(chunks)) + whole.end())
    pieces = [frame for chunk in chunks for frame in cut.feed(chunk)]
    assert seen(pieces + cut.end()) == frames
    assert (cut.too_large, cut.clean) == (whole.too_large, whole.clean)


@moderate
@given(cut_bodies())
def test_the_standards_algorithm_agrees(chunks: list[bytes]) -> None:
    """Event and data of every frame are what WHATWG's own steps give."""
    assert said(read(*chunks)) == reference(b"".join(chunks))


@moderate
@given(bodies)
def test_raw_bytes_read_back_as_the_same_frames(body: bytes) -> None:
    """What goes out means what came in, holds nothing that must not go out, and no byte of our own."""
    frames = read(body)
    out = b"".join(frame.raw for frame in frames)
    assert said(read(out)) == said(frames)
    for line in out.splitlines():
        assert line.partition(b":")[0] not in (b"id", b"retry")
        assert not line.startswith((b":", BOM))
    rest = iter(body)
    assert all(byte in rest for byte in out)
    for frame in frames:
        assert frame.with_data(frame.data) == frame.raw


texts = st.lists(st.sampled_from([b"a", b" ", b":", b"data: b", b"\n", b"\r", b"\r\n", b"\0"])).map(b"".join)


@moderate
@given(bodies, texts)
def test_other_data_reads_back_beside_the_same_lines(body: bytes, data: bytes) -> None:
    """``with_data`` gives the event its new data and keeps all other lines in their order."""
    normal = data.replace(b"\r\n", b"\n").replace(b"\r", b"\n")
    for frame in read(body):
        changed = one(frame.with_data(data))
        assert (changed.event, changed.data) == (frame.event, normal)
        assert other_lines(changed.raw, b"data") == other_lines(frame.raw, b"data")


@moderate
@given(bodies, st.none() | texts)
def test_another_event_line_reads_back_beside_the_same_lines(body: bytes, name: bytes | None) -> None:
    """``with_event`` changes the name's presence, and neither the data nor any other line."""
    for frame in read(body):
        changed = one(frame.with_event(name))
        assert (changed.event is None) == (name is None)
        if frame.event is not None and name is not None:
            assert changed.raw == frame.raw
        assert changed.data == frame.data
        assert other_lines(changed.raw, b"event") == other_lines(frame.raw, b"event")


def other_lines(raw: bytes, name: bytes) -> list[bytes]:
    return [line for line in raw.splitlines() if line and line.partition(b":")[0] != name]
