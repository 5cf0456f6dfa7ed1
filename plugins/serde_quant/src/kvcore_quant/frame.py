"""The encoded bytes. All integers are little-endian.

    offset  size
    0       2       b"KQ"
    2       1       format: 1 fp8, 2 int4, 0: the payload follows as it is
    3       1       elements: 1 bfloat16, 2 float16, 3 float32; 0 where the payload follows as it is
    4       8       length of the payload in bytes
    12      2, 2    number of cuts c, number of spans s
    16      8 * c   each cut: run (2), across (2), stride (4)
    ...     4 * s   each span: elements of a region; 0: the span is left as it is
    ...             each span's table: for each rank, layer and region one byte, the number of its cut from 1; 0: the
                    region is left as it is
    ...             each span's data: for each cut in order, of all its regions (rank by rank, layer by layer) the
                    scales, then (int4) the minima, then the codes; at last the regions that are left as they are

A span is consecutive layers with blocks of one size, as the layout says; one that is not a whole number of elements is
a span of its own. `cuts.py` says what a cut is, `coder.py` how a region is encoded.
"""

import struct
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from kvcore.api import ObjectLayout, SerdeError
from kvcore_quant.coder import Format
from kvcore_quant.cuts import Cut, Plan, Span, spans
from kvcore_quant.floats import KINDS, Kind

HEADER = struct.Struct("<2sBBQ")
COUNTS = struct.Struct("<HH")
CUT = struct.Struct("<HHI")
REGION = struct.Struct("<I")
MAGIC = b"KQ"
MAX_CUTS = 255
MAX_GROUP = 1 << 16


class Section(NamedTuple):
    """What one cut has of one span. `cut` None: left as it is.

    Args:
        number: of its span. span, region: the span, and the elements of a region; 0: all of the span as it is.
        where: of the cells: ranks, layers and regions, three arrays.
        groups: of one cell.
        parameters, codes: where they stand in the encoded bytes; `end` is one past the last.
    """

    number: int
    span: Span
    region: int
    cut: Cut | None
    where: tuple[Any, Any, Any]
    groups: int
    parameters: int
    codes: int
    end: int


def prologue(form: Format, kind: Kind, plan: Plan, tables: list[Any], nbytes: int) -> bytes:
    """All that stands before the data."""
    parts = [HEADER.pack(MAGIC, form.code, kind.code, nbytes), COUNTS.pack(len(plan.cuts), len(plan.regions))]
    parts += [CUT.pack(*cut) for cut in plan.cuts]
    parts += [REGION.pack(region) for region in plan.regions]
    parts += [table.tobytes() for table in tables]
    return b"".join(parts)


def sections(
    form: Format, kind: Kind, layout: ObjectLayout, plan: Plan, tables: list[Any], offset: int
) -> Iterator[Section]:
    """The sections of the data, which begins at `offset`. `tables[span][rank, layer, region]`."""
    for i, span in enumerate(spans(layout, kind.width)):
        region, table = plan.regions[i], tables[i]
        if not region:
            end = offset + layout.ranks * span.nbytes
            yield Section(i, span, 0, None, ((), (), ()), 0, offset, offset, end)
            offset = end
            continue
        for number in (*range(1, len(plan.cuts) + 1), 0):
            where = np.nonzero(table == number)
            count = len(where[0])
            if not count:
                continue
            elements = count * layout.blocks * region
            if number:
                cut = plan.cuts[number - 1]
                groups = elements // cut.group
                codes = offset + 2 * form.parameters * groups
                end = codes + form.code_rows(cut.group) * groups
                yield Section(i, span, region, cut, where, groups // count, offset, codes, end)
            else:
                end = offset + elements * kind.width
                yield Section(i, span, region, None, where, 0, offset, offset, end)
            offset = end


def read_plan(form: Format, source: memoryview, layout: ObjectLayout) -> tuple[Kind, Plan, list[Any], int]:
    """The kind, plan, tables, and where the data begins. All is checked. Raises `SerdeError`."""
    _, _, code, _ = HEADER.unpack_from(source)
    kind = next((kind for kind in KINDS.values() if kind.code == code), None)
    if kind is None:
        raise SerdeError(f"quant: elements of kind {code} are unknown")
    try:
        count, known = COUNTS.unpack_from(source, HEADER.size)
        at = HEADER.size + COUNTS.size
        cuts = tuple(Cut(*CUT.unpack_from(source, at + i * CUT.size)) for i in range(count))
        at += count * CUT.size
        regions = tuple(REGION.unpack_from(source, at + i * REGION.size)[0] for i in range(known))
        at += known * REGION.size
    except struct.error:
        raise SerdeError("quant: cut off within the header") from None
    wanted = spans(layout, kind.width)
    if len(wanted) != known or count > MAX_CUTS:
        raise SerdeError(f"quant: {count} cuts of {known} spans, the layout has {len(wanted)} spans")
    tables = []
    for span, region in zip(wanted, regions, strict=True):
        if region and (not span.block or span.block % region):
            raise SerdeError(f"quant: regions of {region} elements do not divide a block of {span.block}")
        shape = (layout.ranks, span.layers, span.block // region if region else 0)
        size = shape[0] * shape[1] * shape[2]
        if at + size > len(source):
            raise SerdeError("quant: cut off within the tables")
        table = np.frombuffer(source, np.uint8, size, at).reshape(shape)
        for number in np.unique(table).tolist():
            if number > count or (number and not _fits(form, cuts[number - 1], region, layout.blocks)):
                raise SerdeError(f"quant: cut {number} does not fit regions of {region} elements")
        tables.append(table)
        at += size
    return kind, Plan(cuts, regions, ()), tables, at


def _fits(form: Format, cut: Cut, region: int, blocks: int) -> bool:
    return (
        min(cut) > 0
        and region % (cut.run * cut.stride) == 0
        and blocks % cut.across == 0
        and cut.group <= MAX_GROUP
        and cut.group % form.group_multiple == 0
    )
