"""Builds the documentation site: every page of the repository, where it stands, under one roof.

    python docs/site.py [--out build/site]

Pages are taken as they are, with their relative links: `docs/`, the READMEs, and the files that any of them links to.
The site loads nothing from elsewhere; its search works where it is served, by anything that serves files. A page that
is not in the navigation, a dead link or a dead anchor is an error.
"""

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGES = ("*.md", "docs/*.md", "plugins/*/README.md", "examples/*/README.md", "benchmarks/README.md")
_LINK = re.compile(r"\]\((?!https?:|mailto:|#)([^)#\s]+)")


def main() -> int:
    parser = argparse.ArgumentParser(description="The documentation site.")
    parser.add_argument("--out", type=Path, default=ROOT / "build/site", help="folder of the site")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "source"
        for page in pages():
            for file in (page, *linked(page)):
                (source / file.relative_to(ROOT)).parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(file, source / file.relative_to(ROOT))
        config = Path(folder) / "mkdocs.yml"
        config.write_text((ROOT / "docs/mkdocs.yml").read_text())
        words = ["-m", "mkdocs", "build", "--strict", "-f", str(config), "-d", str(args.out.resolve())]
        environ = os.environ | {"NO_MKDOCS_2_WARNING": "1"}  # of an advertisement
        done = subprocess.run([sys.executable, *words], env=environ, capture_output=True, text=True, check=False)
    if done.returncode:
        print(*(line for line in done.stderr.splitlines() if not line.startswith("INFO")), sep="\n", file=sys.stderr)
        return 1
    print(f"{args.out}/index.html; with search: python -m http.server --directory {args.out}")
    return 0


def pages() -> list[Path]:
    """Every page of the site."""
    return sorted(page for pattern in PAGES for page in ROOT.glob(pattern))


def linked(page: Path) -> list[Path]:
    """Files of the repository that a page links to and that are no pages."""
    targets = (Path(os.path.normpath(page.parent / link)) for link in _LINK.findall(page.read_text()))
    return [t for t in targets if t.is_file() and t.suffix != ".md"]


if __name__ == "__main__":
    sys.exit(main())
