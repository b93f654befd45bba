"""The model repository that ships with the package: half_plus_two, digits, and scribe, which writes text.

`digits` is made by tools/train_digits.py; its held-out images are tests/vectors/digits_test.json. `scribe` is
made by tools/train_demo_text_model.py. All three run in numpy.
"""

from pathlib import Path


def demo_repository() -> Path:
    """The folder of the demo repository."""
    return Path(__file__).parent
