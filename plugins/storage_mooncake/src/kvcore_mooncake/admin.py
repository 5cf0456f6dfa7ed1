"""The master's HTTP port: what the client library cannot say, which objects there are and how full the pool is.

Asking here leases nothing, unlike every question of the library's.
"""

import http.client
import json
import re
from collections.abc import Iterator
from contextlib import suppress
from typing import Any
from urllib.parse import quote

from kvcore.api import Entry, ObjectKey, StorageError, Usage
from kvcore_mooncake.config import host_and_port

TIMEOUT_S = 5.0
ASKED_AT_ONCE = 200
_METRIC = re.compile(r"^(master_\w+) ([0-9.e+]+)$", re.M)


class Admin:
    """Questions to the HTTP port of a master, `HOST:PORT`. All raise `StorageError` when there is no answer."""

    def __init__(self, address: str) -> None:
        self._address = address

    def entries(self, prefix: str) -> Iterator[Entry]:
        """Every object whose name is `prefix` and that of a key."""
        names = [name for name in self._get("get_all_keys").split() if name.startswith(prefix)]
        for start in range(0, len(names), ASKED_AT_ONCE):
            some = names[start : start + ASKED_AT_ONCE]
            for name, nbytes in self._sizes(some).items():
                with suppress(ValueError):  # not a key's
                    yield Entry(ObjectKey.from_name(name.removeprefix(prefix)), nbytes)

    def usage(self) -> Usage:
        """The whole pool's, others' objects included."""
        found = dict(_METRIC.findall(self._get("metrics")))
        try:
            return Usage(
                nbytes=int(float(found["master_allocated_bytes"])),
                objects=int(float(found["master_key_count"])),
                capacity_bytes=int(float(found["master_total_capacity_bytes"])),
            )
        except KeyError as error:
            raise StorageError(f"{self._what} has no metric {error}: is it the HTTP port of a master?") from error

    def _sizes(self, names: list[str]) -> dict[str, int]:
        """Without those that have gone in the meantime."""
        text = self._get(f"batch_query_keys?keys={quote(','.join(names), safe=',/:')}")
        try:
            found: dict[str, Any] = json.loads(text)["data"]
            return {name: int(said["values"][0]["size_"]) for name, said in found.items() if said["values"]}
        except (ValueError, LookupError, TypeError, AttributeError) as error:
            raise StorageError(f"{self._what} gave an unknown answer for keys: {text:.200}") from error

    @property
    def _what(self) -> str:
        return f"the master's HTTP port {self._address} (`admin_address`)"

    def _get(self, path: str) -> str:
        place = host_and_port(self._address)
        assert place is not None, "the option is checked"
        connection = http.client.HTTPConnection(*place, timeout=TIMEOUT_S)
        try:
            connection.request("GET", f"/{path}")
            answer = connection.getresponse()
            text = answer.read().decode(errors="replace")
        except (OSError, http.client.HTTPException) as error:
            raise StorageError(f"{self._what} does not answer: {error or type(error).__name__}") from error
        finally:
            connection.close()
        if answer.status != 200:
            raise StorageError(f"{self._what} answered {answer.status} to {path[:60]}: {text:.200}")
        return text
