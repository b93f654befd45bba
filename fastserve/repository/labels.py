"""Names of an output's classes: its label file's, or for an ensemble those of the model that writes it."""

from __future__ import annotations

from collections.abc import Sequence

from fastserve.repository.catalog import Catalog
from fastserve.repository.version import Version


def labels_of(version: Version, output: str, catalog: Catalog) -> Sequence[str]:
    """Class names by index, empty for none. An ensemble's own label file goes before its steps'."""
    config = version.config
    found = config.output_labels.get(output, config.class_texts)
    if found or config.options.ensemble is None:
        return found
    for step in config.options.ensemble.steps:
        for inner, tensor in step.outputs.items():
            if tensor == output:
                model = catalog.available(step.model, step.version)
                return labels_of(model, inner, catalog) if model is not None else ()
    return ()
