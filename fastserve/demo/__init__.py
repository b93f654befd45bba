"""The model repository that ships with the package: half_plus_two and digits.

`digits` is made by tools/train_digits.py; its held-out images are tests/vectors/digits_test.json.
"""

from pathlib import Path


def demo_repository() -> Path:
    """The folder of the demo repository."""
    return Path(__file__).parent
