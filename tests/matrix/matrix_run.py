"""One run of the matrix: each engine is driven when its first cell is asked for."""

import json
from pathlib import Path
from typing import Any

from matrix_engines import ENGINES, drive
from matrix_stores import Stores
from matrix_table import Row, row, versions


class Matrix:
    """What each engine has seen of each storage."""

    def __init__(self, running: Stores, folder: Path, models: Path) -> None:
        self.stores = running
        self._folder = folder
        self._models = models
        self._seen: dict[str, Any] = {}

    def seen(self, engine: str) -> dict[str, Any]:
        """Of both processes of this engine; the same failure again when it has failed."""
        if engine not in self._seen:
            files = list(self.stores.files.values())
            try:
                self._seen[engine] = drive(engine, self._folder, self._models, self.stores.site, files)
            except Exception as error:
                self._seen[engine] = error
        if isinstance(found := self._seen[engine], Exception):
            raise found
        return found

    def cells(self, engine: str, way: str) -> tuple[Any, dict[str, Any], dict[str, Any]]:
        """What it says without kvcore; and its cells of this row, cold and hot, by storage."""
        seen = self.seen(engine)
        return seen["cold"]["plain"], seen["cold"]["cells"][way], seen["hot"]["cells"][way]

    def row(self, engine: str, way: str) -> Row:
        """As the README shows it."""
        version = self.seen(engine)["hot"]["versions"][ENGINES[engine].distribution]
        return row(ENGINES[engine].rows[way].format(version), ENGINES[engine].passed, *self.cells(engine, way))

    def below(self, engine: str) -> str:
        """The versions of all but the engine."""
        return versions(self.stores.versions, self.seen(engine)["hot"]["versions"])

    def write(self, path: Path) -> None:
        """Keep what `make matrix` makes the table of."""
        rows = [self.row(name, way) for name, engine in ENGINES.items() for way in engine.rows]
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps({"rows": rows, "below": self.below(next(iter(ENGINES)))}))
