"""The copies of one step layer by layer: loads ahead of the layer that needs them, saves as each layer is computed."""

from collections.abc import Callable, Sequence

from kvcore_vllm.copier import Copier, Layers
from kvcore_vllm.metadata import Load

BATCHES = 8
"""Into so many pieces the layers are cut at most: each is another pass over all blocks of the plan."""


def batches(count: int) -> list[range]:
    """Layers 0 to `count` in order, in at most `BATCHES` pieces."""
    size = -(-count // BATCHES)
    return [range(at, min(at + size, count)) for at in range(0, count, size or 1)]


class LoadsAhead:
    """The loads of a step whose forward pass runs at the same time, on the copier's thread.

    What has failed is only known at the end, and then vLLM drops what the step has computed. So all that is promised of
    a layer is that its copy is over.

    Args:
        jobs: not empty.
        layers: of the model's only KV cache group, in the order of their computation.
        event: has `synchronize()`, waited for before the first copy; or None.
    """

    def __init__(self, copier: Copier, jobs: Sequence[Load], layers: Sequence[str], event: object) -> None:
        self._copier = copier
        self._due: dict[str, int] = {}
        """Layer -> what must be reached before it is computed."""
        for piece in batches(len(layers)):
            for job in jobs:
                self._last = copier.submit("load", job, event, Layers(0, piece), piece.stop == len(layers))
                event = None
            self._due.update(dict.fromkeys(layers[piece.start : piece.stop], self._last))

    def wait(self, layer: str) -> None:
        """Until the copies of this layer are over."""
        if layer in self._due:
            self._copier.reach(self._due.pop(layer))

    def end(self) -> tuple[list[tuple[Load, set[int]]], list[str]]:
        """Each load and the blocks that failed, and the layers that were not waited for. Where there are such, all has
        failed: they may have been computed from what stood there before."""
        self._copier.reach(self._last)
        loaded, _ = self._copier.take()
        return [(job, set(job.blocks) if self._due else bad) for job, bad in loaded], list(self._due)


class SavesAlong:
    """Which layers of a step are saved when, while they are computed: some together, in the order of their group, and
    none before it has been. Where a layer's end is not told, as in a CUDA graph, it is saved after the step.

    Args:
        groups: the layers of each KV cache group.
        save: saves some layers.
    """

    def __init__(self, groups: Sequence[Sequence[str]], save: Callable[[Layers], None]) -> None:
        self._save = save
        self._groups = groups
        self._computed: set[str] = set()
        self._saved = [0] * len(groups)

    def computed(self, layer: str) -> None:
        """This layer has been computed."""
        for group, layers in enumerate(self._groups):
            if layer in layers:
                self._computed.add(layer)
                first = stop = self._saved[group]
                while stop < len(layers) and layers[stop] in self._computed:
                    stop += 1
                if stop == len(layers) or stop - first >= -(-len(layers) // BATCHES):
                    self._save_to(group, stop)

    def end(self) -> None:
        """Save what is left."""
        for group, layers in enumerate(self._groups):
            self._save_to(group, len(layers))

    def _save_to(self, group: int, stop: int) -> None:
        if stop > self._saved[group]:
            self._save(Layers(group, range(self._saved[group], stop)))
            self._saved[group] = stop
