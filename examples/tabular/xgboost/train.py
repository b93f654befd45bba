"""Train a classifier of wines, and write models/wine/1/model.json, with texts for its classes.

python train.py && fastserve serve models
curl http://127.0.0.1:8000/v1/models/wine:predict -d '{"instances": [[13.2, 1.8, 2.1, NaN]]}'
"""

import json
from pathlib import Path

import xgboost
from sklearn.datasets import load_wine

features, kinds = load_wine(return_X_y=True)
model = xgboost.XGBClassifier(n_estimators=20, max_depth=3).fit(features[:, :4], kinds)

folder = Path("models/wine/1")
folder.mkdir(parents=True, exist_ok=True)
model.save_model(folder / "model.json")
names = ["barolo", "grignolino", "barbera"]
(folder.parent / "model.yaml").write_text(
    f"backend: xgboost\nclass_labels: {json.dumps(names)}\nparameters: {{outputs: [labels]}}\n"
)
number = int(model.predict([[13.2, 1.8, 2.1, float("nan")]])[0])
print(json.dumps({"predictions": [names[number]]}))
