"""A trace of one or several logs for the viewer Perfetto: who waited for whom, on one time axis.

The logs are read, drawn by `ledger.trace.builder` and written as Perfetto's packets, an event at a time. The package
`perfetto` is imported when a trace is written and not before: a light install has none.
"""

from collections.abc import Iterable, Iterator, Sequence
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from ledger import events as ev
from ledger.errors import LedgerError
from ledger.file.publish import refuse_existing, write_pages
from ledger.file.read import open_log
from ledger.replay.case import Case, Progress, replay_files
from ledger.trace.builder import TraceBuilder
from ledger.trace.clock import Axis, Clock, axis
from ledger.trace.tracks import Entry, Item, Track

if TYPE_CHECKING:
    from perfetto.protos.perfetto.trace.perfetto_trace_pb2 import TracePacket

INSTALL = "pip install 'kvledger[trace]'"

PAGE_BYTES = 1 << 20
"""Bytes that are encoded between two writes to the file."""

PROGRESS_EVENTS = 10_000
"""Events drawn between two signs of progress."""


class Traced(msgspec.Struct, frozen=True):
    """What was written.

    Attributes:
        events: how many events were drawn.
        axis: where each log stands.
        findings: how many findings are marked.
    """

    target: Path
    events: int
    size_bytes: int
    axis: Axis
    findings: int


def write_trace(paths: Sequence[Path], target: Path, progress: Progress | None = None) -> Traced:
    """Write a trace of the logs in `paths` to a new file.

    Raises:
        LedgerError: the package `perfetto` is not installed.
        LedgerFileError: a log cannot be read.
        LedgerNotWritable: the target exists, or cannot be written. Nothing is left behind.
    """
    encoder = _Encoder()
    refuse_existing(target)
    case = replay_files(paths, progress=progress)
    placed = axis([_again(case, number) for number in range(len(paths))])
    write_pages(target, encoder.pages(_items(case, placed, target, progress)))
    events = sum(log.result.events for log in case.logs)
    return Traced(target, events, target.stat().st_size, placed, len(case.findings))


def _again(case: Case, number: int) -> Iterator[ev.AnyEvent]:
    """Yield the events of a log once more; of one that is still written, as far as it was replayed."""
    log = case.logs[number]
    if log.result.last is not None:
        with open_log(log.path) as file:
            yield from file.events(until_seq=log.result.last.seq)


def _items(case: Case, placed: Axis, target: Path, progress: Progress | None) -> Iterator[Item]:
    total = sum(log.result.events for log in case.logs)
    done = 0
    for number, log in enumerate(case.logs):
        result = log.result
        name = f"engine {result.opened.engine}, boot {result.opened.boot}" if result.opened else log.path.name
        findings = [finding for index, finding in case.findings if index == number]
        builder = TraceBuilder(number, name, findings, Clock(placed.shifts_ns[number]), placed.told()[number])
        for event in _again(case, number):
            builder.draw(event)
            yield from builder.items
            builder.items.clear()
            done += 1
            if progress is not None and done % PROGRESS_EVENTS == 0:
                progress(target, done, total)
        builder.end(result.end.how if result.end is not None else "torn")
        yield from builder.items


class _Encoder:
    """Makes Perfetto's packets of items.

    Raises:
        LedgerError: the package `perfetto` is not installed.
    """

    def __init__(self) -> None:
        try:
            from perfetto.protos.perfetto.trace import perfetto_trace_pb2 as pb  # noqa: PLC0415 - an extra
            from perfetto.trace_builder.proto_builder import StreamingTraceProtoBuilder  # noqa: PLC0415 - an extra
        except ImportError as missing:
            raise LedgerError(f"a trace needs the package perfetto, which is not installed: {INSTALL}") from missing
        self._builder_of = StreamingTraceProtoBuilder
        self._in_order = pb.TrackDescriptor.EXPLICIT
        # The clock that packets have when they name none, and the one that lets the viewer show the time of day.
        self._clocks = (pb.BUILTIN_CLOCK_BOOTTIME, pb.BUILTIN_CLOCK_REALTIME)
        self._whats = {
            "begin": pb.TrackEvent.TYPE_SLICE_BEGIN,
            "end": pb.TrackEvent.TYPE_SLICE_END,
            "instant": pb.TrackEvent.TYPE_INSTANT,
            "counter": pb.TrackEvent.TYPE_COUNTER,
        }

    def pages(self, items: Iterable[Item]) -> Iterator[bytes]:
        """Yield the bytes of a trace, a page at a time."""
        page = BytesIO()
        builder = self._builder_of(page)
        knows_time = False
        for item in items:
            packet = builder.create_packet()
            if isinstance(item, Track):
                self._describe(packet, item)
            else:
                if not knows_time:
                    builder.write_packet(self._time_of_day(builder.create_packet(), item.ts_ns))
                    knows_time = True
                self._enter(packet, item)
            builder.write_packet(packet)
            if page.tell() >= PAGE_BYTES:
                yield page.getvalue()
                page.seek(0)
                page.truncate()
        yield page.getvalue()

    def _time_of_day(self, packet: "TracePacket", ts_ns: int) -> "TracePacket":
        for clock in self._clocks:
            packet.clock_snapshot.clocks.add(clock_id=clock, timestamp=ts_ns)
        return packet

    def _describe(self, packet: "TracePacket", track: Track) -> None:
        descriptor = packet.track_descriptor
        descriptor.uuid = track.id
        descriptor.child_ordering = self._in_order
        if track.process:
            descriptor.process.pid = track.process
            descriptor.process.process_name = track.name
            return
        descriptor.parent_uuid = track.parent
        descriptor.name = track.name
        descriptor.sibling_order_rank = track.place
        if track.unit:
            descriptor.counter.unit_name = track.unit

    def _enter(self, packet: "TracePacket", entry: Entry) -> None:
        packet.timestamp = entry.ts_ns
        packet.trusted_packet_sequence_id = entry.log + 1
        event = packet.track_event
        event.type = self._whats[entry.what]
        event.track_uuid = entry.track
        if entry.what == "counter":
            event.counter_value = entry.value
        if entry.name:
            event.name = entry.name
        if entry.category:
            event.categories.append(entry.category)
        event.flow_ids.extend(entry.flows)
        event.terminating_flow_ids.extend(entry.last_flows)
        for name, value in entry.args.items():
            annotation = event.debug_annotations.add()
            annotation.name = name
            if isinstance(value, str):
                annotation.string_value = value
            elif isinstance(value, int):
                annotation.int_value = value
            else:
                for each in value:
                    annotation.array_values.add().string_value = each
