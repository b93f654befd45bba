"""Train a forest, and write models/flowers/1/model.tl: it is served without scikit-learn.

python train.py && fastserve serve models
curl http://127.0.0.1:8000/v1/models/flowers:predict -d '{"instances": [[5.1, 3.5, 1.4, 0.2]]}'
"""

import json
from pathlib import Path

import treelite
from sklearn.datasets import load_iris
from sklearn.ensemble import RandomForestClassifier

features, species = load_iris(return_X_y=True)
model = RandomForestClassifier(50, random_state=0).fit(features, species)

folder = Path("models/flowers/1")
folder.mkdir(parents=True, exist_ok=True)
treelite.sklearn.import_model(model).serialize(folder / "model.tl")
print(json.dumps({"predictions": model.predict_proba([[5.1, 3.5, 1.4, 0.2]]).tolist()}))
