"""The serde `quant`: elements as fp8 or in four bits. `frame.py` writes the format down."""

import logging
import threading
from collections import OrderedDict
from typing import Any

import numpy as np

from kvcore.api import ObjectLayout, Serde, SerdeError
from kvcore_quant import frame
from kvcore_quant.coder import FORMATS, decode_cells, encode_cells
from kvcore_quant.config import QuantConfig
from kvcore_quant.cuda import CudaCoder, CudaDevice, cells_of
from kvcore_quant.cuts import Plan, batches, learn, ranges, rows
from kvcore_quant.floats import WORDS, Kind, kind_of
from kvcore_quant.frame import HEADER, MAGIC, Section

MAX_PLANS = 64
"""Layouts whose plans are kept."""


class QuantSerde(Serde):
    """Lossy. Several threads may use one instance; the heavy calls release the GIL.

    What it keeps between calls is how to cut objects of a layout, learnt from the first, the second, the fourth, the
    eighth and so on. It steers encoding only: each encoded object says how it is cut.
    """

    lossy = True

    def __init__(self, config: QuantConfig, context: Any) -> None:
        self._format = FORMATS[config.format]
        self._log: logging.Logger = context.log
        self._said: set[str] = set()
        self._gpu = CudaCoder(CudaDevice(config.device)) if config.device != "cpu" else None
        self._plans: OrderedDict[ObjectLayout, tuple[int, Plan | None]] = OrderedDict()
        self._lock = threading.Lock()

    @property
    def tag(self) -> str:
        """See `Serde.tag`."""
        return self._format.tag

    def encode(self, source: memoryview, layout: ObjectLayout) -> memoryview:
        """See `Serde.encode`. What is not the payload of `layout`, or not of a known float, is kept as it is."""
        kind = kind_of(layout.dtype, layout.element_bytes)
        if kind is None:
            self._say(f"KV of {layout.dtype}, {layout.element_bytes} bytes an element, is kept as it is")
        elif len(source) == layout.nbytes and len(source):
            payload = np.frombuffer(source, np.uint8)
            plan = self._plan(payload, layout, kind)
            tables = [np.broadcast_to(table, (layout.ranks, *table.shape)) for table in plan.tables]
            while (encoded := self._encode(payload, layout, kind, plan, tables)) is None:
                pass
            if len(encoded) < HEADER.size + len(source):
                return encoded
        return memoryview(HEADER.pack(MAGIC, 0, 0, len(source)) + bytes(source))

    def decode(self, source: memoryview, into: memoryview, layout: ObjectLayout) -> None:
        """See `Serde.decode`."""
        if len(source) < HEADER.size:
            raise SerdeError(f"quant: {len(source)} bytes are too few")
        magic, code, _, nbytes = HEADER.unpack_from(source)
        if magic != MAGIC or code not in (0, self._format.code):
            raise SerdeError("quant: not the header of this encoding")
        if nbytes != len(into):
            raise SerdeError(f"quant: holds {nbytes} bytes, expected {len(into)}")
        if not code:
            if len(source) != HEADER.size + nbytes:
                raise SerdeError("quant: too long or too short")
            into[:] = source[HEADER.size :]
            return
        if nbytes != layout.nbytes or not nbytes:
            raise SerdeError(f"quant: holds {nbytes} bytes, an object of this layout has {layout.nbytes}")
        kind, plan, tables, offset = frame.read_plan(self._format, source, layout)
        found = list(frame.sections(self._format, kind, layout, plan, tables, offset))
        if found[-1].end != len(source):
            raise SerdeError("quant: the parts do not add up to the length")
        payload, data = np.frombuffer(into, np.uint8), np.frombuffer(source, np.uint8)
        for section in found:
            if section.cut is None:
                array, where, stored = _plain(section, layout, kind, payload, data)
                array[where] = stored
        if self._on_gpu("decode", found, layout, kind, payload, data) is not None:
            return
        scratch = _Scratch()
        for section in found:
            if section.cut is None:
                continue
            target, parameters, codes = self._arrays(section, layout, kind, payload, data)
            for part in batches(len(section.where[0]), layout.blocks * section.region):
                shape = (part.stop - part.start, layout.blocks, section.region)
                decoded = np.empty(shape, WORDS[kind.width])
                room = scratch.of(decoded.size)
                decode_cells(self._format, kind, decoded, section.cut, parameters[:, part], codes[part], room)
                target[tuple(index[part] for index in section.where)] = decoded

    def max_encoded_bytes(self, nbytes: int) -> int:
        """See `Serde.max_encoded_bytes`."""
        return HEADER.size + nbytes

    def _plan(self, payload: Any, layout: ObjectLayout, kind: Kind) -> Plan:
        """How to cut objects of this layout."""
        with self._lock:
            count, plan = self._plans.pop(layout, (0, None))
            self._plans[layout] = count + 1, plan
            if len(self._plans) > MAX_PLANS:
                self._plans.popitem(last=False)
        if plan is None or count & (count - 1) == 0:
            plan = learn(payload, layout, kind, self._format.sizes, 16 * self._format.parameters)
            with self._lock:
                self._plans[layout] = count + 1, plan
        return plan

    def _encode(
        self, payload: Any, layout: ObjectLayout, kind: Kind, plan: Plan, tables: list[Any]
    ) -> memoryview | None:
        """The encoded object; None when regions cannot be encoded, which `tables` then says (at the next try they
        are left as they are)."""
        before = frame.prologue(self._format, kind, plan, tables, len(payload))
        found = list(frame.sections(self._format, kind, layout, plan, tables, len(before)))
        encoded: Any = np.empty(found[-1].end, np.uint8)
        encoded[: len(before)] = np.frombuffer(before, np.uint8)
        coded = [section for section in found if section.cut is not None]
        bad = self._on_gpu("encode", found, layout, kind, payload, encoded)
        if bad is None:
            bad = self._encode_cells(coded, payload, layout, kind, encoded)
        if bad.any():
            first = 0
            for section in coded:
                mine = bad[first : first + len(section.where[0])]
                first += len(mine)
                tables[section.number] = tables[section.number].copy()
                tables[section.number][tuple(index[mine] for index in section.where)] = 0
            return None
        for section in found:
            if section.cut is None:
                array, where, stored = _plain(section, layout, kind, payload, encoded)
                stored[:] = array[where]
        return memoryview(encoded)

    def _on_gpu(
        self, what: str, found: list[Section], layout: ObjectLayout, kind: Kind, payload: Any, data: Any
    ) -> Any:
        """Have a GPU encode or decode all cells, and return which of them could not be; None: it is the CPU's turn."""
        gpu = self._gpu
        cells = cells_of(found, self._format, layout, kind.width) if gpu else None
        if gpu is None or cells is None:
            return None
        try:
            return getattr(gpu, what)(self._format, kind, cells, payload, data)
        except Exception as error:  # CuPy's, NVRTC's and the driver's have no common root
            self._gpu = None
            self._say(f"the GPU failed ({error!r}): from now on the CPU encodes and decodes")
            return None

    def _say(self, text: str) -> None:
        """Log something, once."""
        if text not in self._said:
            self._said.add(text)
            self._log.warning("serde quant: %s", text)

    def _encode_cells(self, coded: list[Section], payload: Any, layout: ObjectLayout, kind: Kind, encoded: Any) -> Any:
        """Encode on the CPU. Which cells of all sections, one after the other, could not be."""
        scratch = _Scratch()
        bad: list[Any] = [np.zeros(0, bool)]
        for section in coded:
            assert section.cut is not None, "these have a cut"
            origin, parameters, codes = self._arrays(section, layout, kind, payload, encoded)
            for part in batches(len(section.where[0]), layout.blocks * section.region):
                cells = origin[tuple(index[part] for index in section.where)]
                room = scratch.of(cells.size)
                bad.append(encode_cells(self._format, kind, cells, section.cut, parameters[:, part], codes[part], room))
        return np.concatenate(bad)

    def _arrays(
        self, section: Section, layout: ObjectLayout, kind: Kind, payload: Any, data: Any
    ) -> tuple[Any, Any, Any]:
        """A section's cells in the payload, `[rank, layer, region, block, element]`, its parameters and its codes."""
        assert section.cut is not None, "regions that are left as they are have neither"
        count = len(section.where[0])
        parameters = data[section.parameters : section.codes].view("<u2")
        codes = data[section.codes : section.end]
        return (
            rows(payload, layout, section.span, section.region, WORDS[kind.width]),
            parameters.reshape(self._format.parameters, count, section.groups),
            codes.reshape(count, self._format.code_rows(section.cut.group), section.groups),
        )


class _Scratch:
    """float32 memory for one call, as large as its largest batch."""

    def __init__(self) -> None:
        self._memory: Any = np.empty(0, np.float32)

    def of(self, elements: int) -> Any:
        """At least so many."""
        if len(self._memory) < elements:
            self._memory = np.empty(elements, np.float32)
        return self._memory


def _plain(section: Section, layout: ObjectLayout, kind: Kind, payload: Any, data: Any) -> tuple[Any, Any, Any]:
    """Of a section that is left as it is: an array of the payload, the index of what is meant of it, and what is
    stored, of the shape of `array[index]`."""
    stored = data[section.codes : section.end]
    if not section.region:
        return ranges(payload, layout, section.span), slice(None), stored.reshape(layout.ranks, -1)
    array = rows(payload, layout, section.span, section.region, WORDS[kind.width])
    shape = (len(section.where[0]), layout.blocks, section.region)
    return array, section.where, stored.view(WORDS[kind.width]).reshape(shape)
