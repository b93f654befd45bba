"""Train a regression, and write models/sugar/1/model.txt, which needs no model.yaml.

python train.py && fastserve serve models
curl http://127.0.0.1:8000/v1/models/sugar:predict -d '{"instances": [[0.04, 0.05, 0.06, 0.02]]}'
"""

import json
from pathlib import Path

import lightgbm
from sklearn.datasets import load_diabetes

features, progress = load_diabetes(return_X_y=True)
model = lightgbm.LGBMRegressor(n_estimators=20, verbose=-1).fit(features[:, :4], progress)

folder = Path("models/sugar/1")
folder.mkdir(parents=True, exist_ok=True)
model.booster_.save_model(folder / "model.txt")
print(json.dumps({"predictions": model.predict([[0.04, 0.05, 0.06, 0.02]]).tolist()}))
