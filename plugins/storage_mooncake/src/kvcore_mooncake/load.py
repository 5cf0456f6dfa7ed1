"""Loading a batch when rooms may be larger or smaller than the objects.

Mooncake moves an object only into a room of exactly its size. A frame's room is exact unless a serde is at work, so
rooms that lie in the arena are tried as they are, in one round trip; for others the sizes are asked first.
"""

from collections.abc import Iterable, Mapping, Sequence

from kvcore.api import MISSING, Failed, Item, Loaded, LoadOutcome
from kvcore_mooncake.errors import ABSENT, INVALID, LEASE_EXPIRED, TRANSFER_FAILED, kind, words
from kvcore_mooncake.memory import StagingFull
from kvcore_mooncake.session import Session
from kvcore_mooncake.transfer import Pieces, batches, cut, from_staging, lay_out, pieces, staged_bytes

HEADER_BYTES = 4096
"""What lies outside the arena and is no longer than this is taken for a frame's header, which is always full."""

_PERHAPS_SIZE = (INVALID, TRANSFER_FAILED)
"""The codes for a room that is smaller or larger than the object. Both have other causes, too."""


class Loading:
    """One `load`. `names` are the objects' names in the pool."""

    def __init__(self, session: Session, items: Sequence[Item], names: Sequence[str]) -> None:
        self._session = session
        self._names = names
        self._rooms = [pieces(item.buffers, session.regions) for item in items]
        self._outcomes: dict[int, LoadOutcome] = {}

    def run(self) -> list[LoadOutcome]:
        """Load; one outcome per item."""
        every = range(len(self._names))
        guessed = {i: _nbytes(self._rooms[i]) for i in every if _is_exact(self._rooms[i])}
        wanted = guessed | self._sizes(i for i in every if i not in guessed)
        codes = self._get(wanted)
        unclear = [i for i, code in codes.items() if code == LEASE_EXPIRED or (code in _PERHAPS_SIZE and i in guessed)]
        again = {
            i: nbytes
            for i, nbytes in self._sizes(unclear).items()
            if nbytes != wanted[i] or codes[i] == LEASE_EXPIRED  # others in its batch took too long: it may be fast
        }
        codes |= self._get(again)
        wanted |= again
        for i, code in codes.items():
            self._outcomes.setdefault(i, _outcome(code, wanted[i]))
        return [self._outcomes[i] for i in every]

    def _sizes(self, indices: Iterable[int]) -> dict[int, int]:
        """The sizes of those that are there and have room enough; for the others the outcome is clear."""
        known = {}
        chosen = list(indices)
        answers = self._session.sizes([self._names[i] for i in chosen]) if chosen else []
        for i, nbytes in zip(chosen, answers, strict=True):
            room = _nbytes(self._rooms[i])
            if nbytes < 0:
                self._outcomes[i] = _outcome(nbytes, 0)
            elif nbytes > room:
                self._outcomes[i] = Failed(f"object of {nbytes} bytes, room for {room}", "too_large")
            else:
                known[i] = nbytes
        return known

    def _get(self, wanted: Mapping[int, int]) -> dict[int, int]:
        """Transfer objects of these sizes; a size or a code for each that could be tried."""
        codes: dict[int, int] = {}
        indices = list(wanted)
        parts = {i: cut(self._rooms[i], nbytes) for i, nbytes in wanted.items()}
        staged = [staged_bytes(parts[i]) for i in indices]
        for batch in batches(staged, self._session.staging.batch_bytes):
            chosen = [indices[n] for n in batch]
            try:
                codes |= self._get_batch(chosen, [parts[i] for i in chosen], wanted)
            except StagingFull as error:
                self._outcomes.update(dict.fromkeys(chosen, Failed(str(error), "full")))
        return codes

    def _get_batch(self, chosen: list[int], parts: list[Pieces], wanted: Mapping[int, int]) -> dict[int, int]:
        with self._session.staging.lend(sum(map(staged_bytes, parts))) as staging:
            layout = lay_out(parts, staging)
            codes = self._session.get([self._names[i] for i in chosen], layout)
            for i, code, copies in zip(chosen, codes, layout.copies, strict=True):
                if code == wanted[i]:
                    from_staging(copies)
        return dict(zip(chosen, codes, strict=True))


def _nbytes(parts: Pieces) -> int:
    return sum(part.nbytes for part in parts)


def _is_exact(room: Pieces) -> bool:
    return bool(room) and all(part.direct or part.nbytes <= HEADER_BYTES for part in room)


def _outcome(code: int, wanted: int) -> LoadOutcome:
    if code in ABSENT:
        return MISSING
    if code < 0:
        return Failed(words(code), kind(code))
    if code != wanted:
        return Failed(f"{code} bytes came of an object of {wanted}")
    return Loaded(code)
