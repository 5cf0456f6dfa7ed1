"""The generated pages are what the sources say, and the YAML in them is a configuration."""

import re
import subprocess
import sys
from pathlib import Path

from kvcore.config import load_config
from kvcore.plugins import Registry

DOCS = Path(__file__).parents[2] / "docs"


def test_the_generated_pages_are_up_to_date():
    done = subprocess.run(
        [sys.executable, str(DOCS / "generate.py"), "--check"], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_the_example_is_a_configuration(tmp_path):
    [block] = re.findall(r"```yaml\n(.*?)```", (DOCS / "configuration.md").read_text(), re.DOTALL)
    (tmp_path / "kvcore.yaml").write_text(block)
    config = load_config(tmp_path / "kvcore.yaml", env={}, registry=Registry())
    assert config.l1.size == 8 << 30
    assert config.l2[0].storage.options.capacity == 2 << 30
