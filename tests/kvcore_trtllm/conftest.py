"""The stand-in is found first: TensorRT-LLM itself is not installed where these tests run."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent / "standin"))
