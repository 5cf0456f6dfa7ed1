"""The flags of a configuration: its file, and single values."""

import argparse

from kvcore.api.errors import ConfigError


def add_file(
    parser: argparse.ArgumentParser,
    text: str = "a YAML file (default: KVCORE_CONFIG, or the defaults)",
    *,
    word: bool = True,
    required: bool = False,
) -> None:
    """The flag of the configuration, `args.config`. `word`: it may stand without the flag, too."""
    one = parser.add_mutually_exclusive_group(required=required)
    if word:
        one.add_argument("config", metavar="FILE", nargs="?", default=argparse.SUPPRESS, help=text)
    one.add_argument("--config", metavar="FILE", help="the same" if word else text)


def add_set(parser: argparse.ArgumentParser) -> None:
    """The flag that sets single values."""
    parser.add_argument(
        "--set", action="append", default=[], metavar="PATH=VALUE", help="set one value, such as l1.size=8GiB"
    )


def flags(args: argparse.Namespace) -> dict[str, str]:
    """What `--set` gave. Raises `ConfigError`."""
    found = {}
    for word in args.set:
        path, equals, value = word.partition("=")
        if not equals:
            raise ConfigError(f"--set {word}: write PATH=VALUE, such as --set l1.size=8GiB")
        found[path] = value
    return found
