"""A model's space in an object store: its objects are single engine blocks, each KV group for itself."""

import re
from collections.abc import Iterator
from dataclasses import replace

from kvcore.api import ConfigError
from kvcore.config.tenants import MAX_NAME
from kvcore.engine import space as spaces
from kvcore.engine.space import ModelSpec

_SCHEME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._+:/-]{0,199}")


class StoreSpace:
    """One registered model of one tenant. Made by `ObjectStore.register`.

    Attributes:
        spec: the model. keys: the key scheme. tenant: its name, or "".
        layouts: of each group's objects, which are one engine block each.
        owner: the store that made it, and the only one that it is good for.
    """

    def __init__(self, spec: ModelSpec, keys: str, tenant: str, owner: object = None) -> None:
        spaces.check(spec)
        if not (isinstance(tenant, str) and len(tenant) <= MAX_NAME and tenant.isprintable()):
            shown = repr(tenant) if len(repr(tenant)) <= MAX_NAME else f"{type(tenant).__name__} {tenant!r:.40}..."
            raise ConfigError(
                f"the tenant is {shown}: give a name of at most {MAX_NAME} printable characters; the empty text is no "
                "tenant"
            )
        if not isinstance(keys, str) or not _SCHEME.fullmatch(keys):
            raise ConfigError(
                f"the key scheme is {keys!r}: give a name of 1 to 200 letters, digits and ._+:/-, with a version, such "
                "as acme-page/1"
            )
        self.spec = spec
        self.keys = keys
        self.tenant = tenant
        self.owner = owner
        self.layouts = tuple(spaces.object_layout(spec, group, 1) for group in spec.groups)

    def group_specs(self) -> Iterator[ModelSpec]:
        """The model cut into one of a single KV group for each of its groups.

        Each group's objects are looked for, loaded and kept by themselves, so each has a namespace of its own.
        """
        count = len(self.spec.groups)
        for g, group in enumerate(self.spec.groups):
            extra = dict(self.spec.extra)
            if count > 1:
                extra["store_group"] = f"{g}/{count}"
            if group.window_tokens is not None:  # which of them to ask for is the caller's to know
                extra["store_window"] = str(group.window_tokens)
            yield replace(self.spec, groups=(replace(group, window_tokens=None),), extra=extra)
