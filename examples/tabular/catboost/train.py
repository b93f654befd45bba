"""Train a classifier with a column of categories, and write models/churn/1/model.cbm.

python train.py && fastserve serve models
curl http://127.0.0.1:8000/v1/models/churn:predict -d '{"instances": [{"months": 3, "plan": "basic"}]}'
"""

import json
from pathlib import Path

import catboost
import pandas

clients = pandas.DataFrame({"months": [1, 2, 3, 24, 30, 36] * 5, "plan": ["basic", "basic", "plus"] * 10})
leaves = ["yes", "yes", "yes", "no", "no", "no"] * 5
model = catboost.CatBoostClassifier(iterations=20, verbose=0, allow_writing_files=False)
model.fit(clients, leaves, cat_features=["plan"])

folder = Path("models/churn/1")
folder.mkdir(parents=True, exist_ok=True)
model.save_model(str(folder / "model.cbm"))
(folder.parent / "model.yaml").write_text("backend: catboost\nparameters: {outputs: [predictions]}\n")
print(json.dumps({"predictions": model.predict([[3, "basic"]]).tolist()}))
