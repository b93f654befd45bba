"""The model repository that ships with the package: half_plus_two, digits, and scribe, which writes text.

`digits` is made by tools/train_digits.py; its held-out images are tests/vectors/digits_test.json. `scribe` is
made by tools/train_demo_text_model.py; what it needs is large, and the others are served without it.
"""

from pathlib import Path

from fastserve.backends.registry import find_backend

TEXT_MODEL = "scribe"


def demo_repository() -> Path:
    """The folder of the demo repository."""
    return Path(__file__).parent


def missing_models() -> dict[str, str]:
    """The models that cannot be served here, as something they need is not installed: name -> what to say."""
    backend = find_backend("text")
    return {} if backend.installed else {TEXT_MODEL: backend.missing_text}
