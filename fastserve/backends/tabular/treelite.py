"""The treelite backend: forests of trees of several libraries, run by a library of 3 MB (GTIL).

    model.tl                     treelite.Model.serialize: made from XGBoost, LightGBM, scikit-learn, ...
    model.json, model.ubj        of XGBoost
    model.txt                    of LightGBM

    predictions      what treelite.gtil.predict returns, without axes of one     float32 or float64
    margins          the same before the objective's function
    leaves           the leaf that a row falls into, of each tree                float32 or float64

Reading a file runs no code. Rows have the model's own dtype. A NaN is a missing value. Numbers may differ
in the last bit from those of the library that trained a forest, since sums have another order.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from fastserve.backends.tabular.base import (
    LEAVES,
    PREDICTIONS,
    OpenedModel,
    TabularBackend,
    number_columns,
)

MARGINS = "margins"


class TreeliteBackend(TabularBackend):
    """Runs a forest by Treelite."""

    files = ("model.tl", "model.json", "model.ubj", "model.txt")

    def open(self, file: Path) -> OpenedModel:
        """Read the file, by its ending."""
        import treelite
        from treelite import frontend, gtil

        if file.suffix == ".txt":
            forest = frontend.load_lightgbm_model(str(file))
        elif file.suffix in (".json", ".ubj"):
            forest = frontend.load_xgboost_model(str(file), format_choice="use_suffix")
        else:
            forest = treelite.Model.deserialize(str(file))
        self.dtype = str(forest.input_type)
        threads = self.threads or -1

        def predict(rows: Any, *, margin: bool) -> Any:
            found = gtil.predict(forest, rows, nthread=threads, pred_margin=margin)
            found = found[:, 0] if found.ndim == 3 and found.shape[1] == 1 else found
            return found[:, 0] if found.ndim == 2 and found.shape[1] == 1 else found

        outputs: dict[str, Callable[[Any], Any]] = {
            PREDICTIONS: lambda rows: predict(rows, margin=False),
            MARGINS: lambda rows: predict(rows, margin=True),
            LEAVES: lambda rows: gtil.predict_leaf(forest, rows, nthread=threads),
        }
        names = [str(number) for number in range(int(forest.num_feature))]
        return OpenedModel(number_columns(names), outputs)
